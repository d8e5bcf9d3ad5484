"""Eight CPU devices, the strictest settings, and float64 where a test asks for it."""

import atexit
import collections
import gc
import logging
import math
import os
import pathlib
import shutil
import signal
import tempfile
import zlib

import jax
import pytest

_XLA_FLAGS = os.environ.get("XLA_FLAGS", "")
if jax.__version__.startswith("0.10.") and "fusion_emitters" not in _XLA_FLAGS:
    # XLA's older code generator compiles in half the time: 42 s of a processor became 20 in
    # tests/bilevel/test_identities.py. Later versions have the newer one alone.
    os.environ["XLA_FLAGS"] = f"--xla_cpu_use_fusion_emitters=false {_XLA_FLAGS}"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What one test, or a program that it starts, has compiled is not compiled again.
    _DIRECTORY = tempfile.mkdtemp(prefix="hetjax-tests-")
    atexit.register(shutil.rmtree, _DIRECTORY, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _DIRECTORY
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
# Ignored under nohup, or in the background of a shell, and so by what tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
jax.config.update("jax_num_cpu_devices", 8)
logging.root.addHandler(logging.NullHandler())  # or absl adds another, which takes what is said
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")  # every cast is written down
# Modules whose casts nobody has gone through yet: JAX promotes types there, as by default.
_PROMOTING = [
    "test_benchmark_processes",
    "test_benchmark_quotas",
    "test_checkout_drill",
    "test_compare",
    "test_compare_orders",
    "test_fault_drill",
    "test_readme",
    "test_simulate_input",
    "test_simulate_many",
    "test_tasks",
    "test_train",
    "bilevel.rounds.test_messages",  # optax.noisy_sgd is not strict
    "models.test_linen_modules",
    "models.test_nnx_modules",
    "models.test_public_scripts",
    "models.test_stateful_models",
    "rounds.test_average",  # `stateful_problem` is not strict
    "rounds.test_model_state",
    "rounds.test_model_state_limits",  # BatchNorm is not strict
    "rounds.test_objectives",
    "rounds.test_judged",
    "rounds.test_local_steps",  # Optax is not strict
    "rounds.test_local_steps_at_rest",
    "rounds.test_optimizers",  # Optax is not strict
    "rounds.test_programs",
    "rounds.test_resume",
    "rounds.test_rule_records",
    "rounds.test_rules",
    "rounds.test_signs",
    "rounds.test_slices",  # Optax is not strict
    "rounds.test_slice_processes",
    "rounds.test_slice_refusals",
    "ordering.test_matrix_free",
]


def pytest_addoption(parser):
    parser.addoption("--one_of", type=int, default=1, help="run one in so many of the tests")
    parser.addoption("--all", action="store_true", help="run all tests, and not the core alone")
    parser.addoption("--rest", action="store_true", help="run all tests but the core")


def pytest_collection_modifyitems(config, items):
    """Leaves out the engines' tests and all outside the core, unless they are asked for.

    With `--one_of` those stay that a hash of their names puts first.
    """
    _keep_core(config, items)
    by_path = any("tests/engines" in arg for arg in config.args)
    if not by_path and "engines" not in config.getoption("markexpr"):
        left = [item for item in items if item.get_closest_marker("engines")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    if "optimization_level=0" in _XLA_FLAGS:
        why = "by the last bits of programs that LLVM optimises; XLA_FLAGS leaves that out"
        for item in items:
            if item.get_closest_marker("optimised"):
                item.add_marker(pytest.mark.skip(reason=why))
    _waiting_first(items)
    if (one_of := config.getoption("one_of")) == 1:
        return
    by_hash = sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))
    left = set(by_hash[math.ceil(len(items) / one_of) :])
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True, scope="module")
def _caches():
    """What a module's tests have compiled is let go; a worker of all tests came to 5 GB."""
    yield
    jax.clear_caches()


def _waiting_first(items):
    """Puts tests that wait for minutes, and hardly compute, first: one worker of xdist has them
    done while the others compute, and the end waits for none."""
    name = "tests/comm/test_elastic"
    items.sort(key=lambda i: not (i.nodeid.startswith(name) and i.get_closest_marker("slow")))


def _keep_core(config, items):
    """Keeps the tests of core.txt, unless a path, -k, -m or an option names others."""
    option = config.getoption
    names_tests = config.args_source is config.ArgsSource.ARGS
    if option("all") or names_tests or any(map(option, ("keyword", "markexpr", "lf"))):
        return
    lines = pathlib.Path(__file__).with_name("core.txt").read_text().splitlines()
    core = tuple(line for line in lines if line and not line.startswith("#"))
    left = [item for item in items if item.nodeid.startswith(core) == option("rest")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
    config.is_core = not option("rest")


def pytest_collection_finish():
    """Python looks through what JAX keeps again and again: a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


_compiled = []  # (program, seconds) of the test that runs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    _compiled.clear()
    result = yield
    secs = collections.Counter()
    for name, of_one in _compiled:
        secs[name] += of_one
    most = ", ".join(f"{name} {total:.1f} s" for name, total in secs.most_common(3))
    item.user_properties.append(("compiled", f"{len(_compiled)} programs: {most}"))
    return result


def _notes(event, secs, fun_name="", **_):
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append((fun_name, secs))


jax.monitoring.register_event_duration_secs_listener(_notes)


def pytest_terminal_summary(terminalreporter):
    """The slowest tests, and what they compile in their own process."""
    ran = [each for each in terminalreporter.getreports("passed") if each.when == "call"]
    slowest = sorted(ran, key=lambda each: -each.duration)[:20] if len(ran) > 100 else []
    if slowest:
        terminalreporter.section("the slowest tests, and what they compile")
    for each in slowest:
        compiled = dict(each.user_properties).get("compiled")
        terminalreporter.line(f"{each.duration:6.1f} s  {each.nodeid}  {compiled}")
    if getattr(terminalreporter.config, "is_core", False):
        terminalreporter.line("These were the tests of tests/core.txt; --all runs every test.")


@pytest.fixture(autouse=True, scope="module")
def _promotion(request):
    if request.module.__name__.removeprefix("tests.") not in _PROMOTING:
        yield
        return
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def float64():
    """64-bit numbers in this test, in all threads."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="session")
def test_data():
    """The original files of the benchmark data sets, where the machine has them."""
    path = os.environ.get("HETJAX_TEST_DATA")
    if not path or not pathlib.Path(path).is_dir():
        pytest.skip("HETJAX_TEST_DATA names no directory with the original data files")
    return pathlib.Path(path)
