"""Runs a module's command line until its arguments are read, and no further.

python -m tests.pages.dry MODULE ARGUMENTS…
"""

import argparse
import ast
import importlib.util
import pathlib
import runpy
import sys


def main(module, arguments):
    spec = importlib.util.find_spec(module)
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    imported = {
        alias.name
        for node in ast.walk(ast.parse(pathlib.Path(spec.origin).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if imported & {"app", "absl", "command_line"}:
        ends = arguments.index("--") if "--" in arguments else len(arguments)
        arguments = [*arguments[:ends], "--only_check_args", *arguments[ends:]]
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *given, **named):
        parse(self, *given, **named)
        raise SystemExit(0)

    argparse.ArgumentParser.parse_args = parsed
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
