"""Where slimrl unpickles, and why no stranger can have written what it reads there."""

import ast
from pathlib import Path

import slimrl

ROOT = Path(slimrl.__file__).parent

PLACES = {
    "resync/ranks.py": "another rank of the trainer, over the group in which torch exchanges objects too",
    "rollout/episode_worker.py": "the driver, through the Ray of its run",
    "runtime/cluster/episode_workers.py": "an actor that it started",
    "checkpoints/torch_dist/safe_pickle.py": "a checkpoint, of which it makes classes of an allow-list alone",
}
CALLS = {"loads", "load", "Unpickler", "_Unpickler"}
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "_pickle"}


def reads(path: Path) -> list[str]:
    """What unpickles in a file: names of modules that it reads pickles with, and calls of torch.load without limits."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in MODULES and name in CALLS:
                found.append(f"{module}.{name}")
            case ast.ImportFrom(module=module, names=names) if module in MODULES:
                found += [f"{module}.{alias.name}" for alias in names if alias.name in CALLS]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                limits = {keyword.arg: keyword.value for keyword in keywords}.get("weights_only")
                if not (isinstance(limits, ast.Constant) and limits.value is True):
                    found.append("torch.load")
    return found


def test_nothing_else_is_unpickled():
    found = {str(path.relative_to(ROOT)): names for path in ROOT.rglob("*.py") if (names := reads(path))}
    assert found.keys() == PLACES.keys(), found


def test_the_search_finds_what_there_is(tmp_path):
    code = tmp_path / "code.py"
    for text in (
        "import pickle\npickle.loads(b'')",
        "from pickle import loads",
        "import torch\ntorch.load('x', weights_only=False)",
        "import torch\ntorch.load('x')",
        "import pickle\nclass Own(pickle.Unpickler): pass",
    ):
        code.write_text(text)
        assert reads(code), text
    code.write_text("import torch, json, pickle\ntorch.load('x', weights_only=True)\njson.loads('1')\npickle.dumps(1)")
    assert not reads(code)
