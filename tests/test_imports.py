"""What importing brings in, and what the sources may not contain."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_gradcomp
from horovod_gradcomp import ops
from horovod_gradcomp.testing import frameworks

PACKAGE = Path(horovod_gradcomp.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "testing")
"""What does not need NumPy: all but the checks for codecs of one's own."""
FRAMEWORKS = {"torch", "tensorflow", "keras", "tf_keras", "jax", "mxnet", "horovod"}


def place(path):
    return path.relative_to(PACKAGE).as_posix()


ALL_FILES = pytest.mark.parametrize("path", FILES, ids=place)


def run(code):
    """Run code in a fresh interpreter and return what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def loaded_by(*modules):
    """Return the top-level modules that are loaded after some imports."""
    imports = "".join(f"import {m}\n" for m in modules)
    return set(
        run(
            f"{imports}import json, sys\n"
            "print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
        )
    )


@pytest.mark.parametrize(
    "module",
    [
        "horovod_gradcomp",
        "horovod_gradcomp.codecs",
        "horovod_gradcomp.ops",
        "horovod_gradcomp.lab",
        *(
            f"horovod_gradcomp.core.{path.stem}"
            for path in sorted((PACKAGE / "core").glob("*.py"))
            if path.stem != "__init__"
        ),
    ],
)
def test_no_framework_and_no_numpy(module):
    loaded = loaded_by(module)
    assert "horovod_gradcomp" in loaded
    assert not loaded & {*FRAMEWORKS, "numpy"}


def test_the_torch_front_end_brings_no_tensorflow():
    loaded = loaded_by("horovod_gradcomp.torch")
    assert {"torch", "horovod"} <= loaded
    assert not loaded & {"tensorflow", "keras", "tf_keras"}


def test_the_tensorflow_front_end_brings_no_torch():
    # Keras looks for torch by itself; ours are then no more than what TensorFlow brings.
    loaded = loaded_by("horovod_gradcomp.tensorflow")
    assert {"tensorflow", "horovod"} <= loaded
    if "torch" in loaded:
        assert "torch" in loaded_by("horovod.tensorflow")


SNAPSHOT = """
import json, sys, types, warnings
import horovod.{framework} as hvd

def look():
    return {{
        (name, attribute): id(value)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "horovod" and isinstance(module, types.ModuleType)
        for attribute, value in vars(module).items()
        if not isinstance(value, types.ModuleType) and not attribute.startswith("__")
    }}

def classes():
    return {{
        (name, attribute, member): id(value)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "horovod" and isinstance(module, types.ModuleType)
        for attribute, cls in vars(module).items()
        if isinstance(cls, type)
        for member, value in vars(cls).items()
        if callable(value) or isinstance(value, (staticmethod, classmethod, property))
    }}

before, inside, filters = look(), classes(), list(warnings.filters)
import horovod_gradcomp.{framework} as ours
from horovod_gradcomp.codecs import REGISTRY
for name in REGISTRY:
    getattr(ours.Compression, name)()
after, inside_after = look(), classes()
changed = [str(k) for k, v in before.items() if after.get(k) != v]
changed += [str(k) for k, v in inside.items() if inside_after.get(k) != v]
added = [str(k) for k in after if k not in before and k[0] in {{name for name, _ in before}}]
print(json.dumps({{
    "looked": len(before) + len(inside), "changed": changed, "added": added,
    "filters": filters == list(warnings.filters),
}}))
"""


@pytest.mark.parametrize("framework", frameworks.NAMES)
def test_horovod_is_left_as_it_is(framework):
    found = run(SNAPSHOT.format(framework=framework))
    assert found["looked"] > 200
    assert found["changed"] == []
    assert found["added"] == []
    assert found["filters"]


# The sources ----------------------------------------------------------------------------------


def imports(path):
    """Return (top-level module, whether at the top of the file) for each absolute import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], id(node) in top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0], id(node) in top


def allowed(path):
    """Return the frameworks that a file may import."""
    folder, _, rest = place(path).partition("/")
    if folder == "ops":
        return {rest.partition(".")[0].partition("_")[0]}
    if place(path) == "keras/on_torch.py":
        return {"torch", "horovod"}
    return {
        "torch": {"torch", "horovod"},
        "tensorflow": {"tensorflow", "horovod"},
        "keras": {"tensorflow", "keras", "tf_keras", "horovod"},
        "lab": {"horovod"},
    }.get(folder, set())


@ALL_FILES
def test_frameworks_are_imported_where_they_belong(path):
    for module, at_top in imports(path):
        assert module != "numpy", "nothing here imports NumPy"
        if module in FRAMEWORKS and module not in allowed(path):
            # A command may look at what is installed, once it runs.
            assert place(path).startswith("cli/"), f"{place(path)} imports {module}"
            assert not at_top, f"{place(path)} imports {module} at its top"


@ALL_FILES
def test_no_way_round_by_name(path):
    """Frameworks are not reached by importlib or sys.modules in what is framework-free."""
    if place(path).partition("/")[0] in ("core", "codecs"):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        assert not names & {"importlib", "__import__", "torch", "tf", "tensorflow", "np", "numpy"}


@ALL_FILES
def test_no_call_to_numpy(path):
    """Data never leaves the device; only a report of counts may ask for numbers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    reports = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and "stats" in (node.name, *(argument.arg for argument in node.args.args))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr != "numpy" or id(node) in reports, f"line {node.lineno}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if place(p).partition("/")[0] in ("core", "codecs")], ids=place
)
def test_no_codec_is_special(path):
    """No decision by a codec's name, and nothing waits for the device."""
    from horovod_gradcomp.codecs import REGISTRY

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
            for value in values:
                if isinstance(value, ast.Constant) and value.value in REGISTRY:
                    assert value.value == "none", f"line {node.lineno}: {value.value!r}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in ("item", "tolist", "cpu"), f"line {node.lineno}"


def functions(module):
    return [
        (name, value)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__ == module.__name__
    ]


@pytest.mark.parametrize("name", frameworks.NAMES)
def test_ops_are_those_of_the_protocol(name):
    wanted = [
        (n, f) for n, f in vars(ops.Ops).items() if inspect.isfunction(f) and not n.startswith("_")
    ]
    got = functions(frameworks.load(name).xp)
    assert [n for n, _ in got] == [n for n, _ in wanted]
    for (label, ours), (_, theirs) in zip(got, wanted):
        want = [p for p in inspect.signature(theirs).parameters if p != "self"]
        assert list(inspect.signature(ours).parameters) == want, label
        assert theirs.__doc__, label
