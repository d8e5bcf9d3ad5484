"""The manifests for Kubernetes, which were not run: their fields, and the place of each process."""

import itertools
import json
import pathlib
import re

import jsonschema
import pytest
import yaml

from hetjax import process_info

ROOT = pathlib.Path(__file__).parent.parent
MANIFESTS = ROOT / "docs/kubernetes"
SCHEMAS = json.loads((ROOT / "tests/kubernetes.json").read_text())
NUM_PROCESSES = 4
LABEL = re.compile(r"metadata\.labels\['jobset\.sigs\.k8s\.io/(.+)'\]")


def documents(name):
    return {each["kind"]: each for each in yaml.safe_load_all((MANIFESTS / name).read_text())}


def check(document):
    schema = {"$ref": f"#/$defs/{document['kind']}", **SCHEMAS}
    jsonschema.Draft202012Validator(schema).validate(document)


def environment(pod, labels, **of_kubernetes):
    """What a container finds, by the rules for `value` and `fieldRef`."""
    found = dict(of_kubernetes)
    (container,) = pod["containers"]
    for variable in container["env"]:
        if "value" in variable:
            value = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], variable["value"])
        else:
            (path,) = variable["valueFrom"]["fieldRef"].values()
            value = labels[LABEL.fullmatch(path)[1]]
        found[variable["name"]] = value
    return found


@pytest.mark.parametrize("name", ["indexed_job.yaml", "jobset.yaml", "rayjob.yaml"])
def test_the_manifests_have_fields_of_the_api_alone(name):
    found = documents(name)
    assert found.keys() in ({"Service", "Job"}, {"JobSet"}, {"RayJob"})
    for document in found.values():
        check(document)


def test_a_pod_of_the_indexed_job_finds_its_place():
    found = documents("indexed_job.yaml")
    job, service = found["Job"]["spec"], found["Service"]
    pod, name = job["template"]["spec"], found["Job"]["metadata"]["name"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == NUM_PROCESSES
    for index in range(NUM_PROCESSES):
        place = process_info.find(environment=environment(pod, {}, JOB_COMPLETION_INDEX=str(index)))
        assert place == (index, NUM_PROCESSES, f"{name}-0.{pod['subdomain']}:7000", None)
    # What gives the pods their names: a headless service that selects them.
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}


def test_a_pod_of_either_group_of_the_jobset_finds_its_place_in_both():
    jobset = documents("jobset.yaml")["JobSet"]
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    groups, of = spec["replicatedJobs"], spec["coordinator"]
    address = f"{name}-{of['replicatedJob']}-{of['jobIndex']}-{of['podIndex']}.{name}"
    assert [group["name"] for group in groups] == ["fast", "slow"]
    number, places, cores = itertools.count(), [], []
    for group in groups:
        job = group["template"]["spec"]
        assert job["completions"] == job["parallelism"] == 1  # a Job a process
        pod = job["template"]["spec"]
        cores.append(float(pod["containers"][0]["resources"]["limits"]["cpu"]))
        for _ in range(group["replicas"]):
            labels = {
                "job-global-index": str(next(number)),
                "global-replicas": str(sum(each["replicas"] for each in groups)),
                "coordinator": address,
            }
            found = environment(pod, labels, JOB_COMPLETION_INDEX="0")  # the same for all
            places.append(process_info.find(environment=found))
    assert places == [(n, NUM_PROCESSES, f"{address}:7000", None) for n in range(NUM_PROCESSES)]
    assert groups[0]["name"] == of["replicatedJob"]  # numbers follow the order of the groups
    assert of["jobIndex"] == of["podIndex"] == 0  # so its coordinator is process 0
    assert cores[0] > cores[1]


def test_each_pod_of_the_rayjob_sees_the_workdir_and_a_group_has_room_for_a_seat():
    job = documents("rayjob.yaml")["RayJob"]["spec"]
    cluster = job["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    cores = []
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        (volume,) = group["template"]["spec"]["volumes"]
        (mount,) = container["volumeMounts"]
        assert volume["persistentVolumeClaim"]["claimName"] == mount["name"] == volume["name"]
        cores.append(float(container["resources"]["limits"]["cpu"]))
    text = (MANIFESTS / "rayjob.yaml").read_text()
    (seats,) = re.findall(r"^# (\[\{.*\}\])\.$", text, re.MULTILINE)
    assert {seat["CPU"] for seat in json.loads(seats)} == set(cores[1:])
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
