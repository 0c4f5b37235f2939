"""Check the rules of the code in its source: layers, forbidden imports, swallowed errors, hardware names, commands.

If one of these tests fails, the code is usually wrong, not the rule. docs/architecture.md gives the reason for each.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest

from edgeq.cli import COMMANDS, FILES, group
from tests import house
from tests.house import nodes

REPOSITORY = Path(__file__).resolve().parent.parent
EDGEQ = REPOSITORY / "edgeq"
RUNTIME = REPOSITORY / "targets" / "runtime"

# The lowest layer first. A package is a module or package directly under edgeq/. It imports only from lower layers.
LAYERS = (
    {"arguments"},
    {"errors"},
    {"util", "signature", "demo", "distributed"},
    {"scheme", "run"},
    {"model"},
    {"data", "hardware"},
    {"calibration", "describe"},
    {"measure", "bundle"},
    {"quantization"},
    {"backends", "emulate", "reporting"},
    {"prove", "retargeting"},
    {"remote"},
    {"tuning"},
    {"jobs"},
    {"cli", "compat"},
    {"__init__", "__main__"},
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}

# The rooms of edgeq_device, the lowest first. A module imports only from its own room and from lower ones.
ROOMS = ("errors", "system", "trust", "model", "prepare", "answers", "measure", "engines", "bundle", "program", "cli")

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

HARDWARE = re.compile(
    r"(?<![a-z0-9])("
    r"x86(_64)?|x64|amd64|i[3-6]86|arm64|aarch64|armv\d\w*|riscv\d*|ppc64le|s390x"
    r"|sse\d?\w*|avx\w*|amx\w*|vnni\w*|neon|asimd\w*|dotprod|i8mm|sve\d?|rvv"
    r"|cortex\w*|neoverse\w*|graviton\d?|zen\d?|epyc|ryzen|xeon|haswell|broadwell|skylake|nehalem"
    r"|(cascade|alder|sapphire|ice|lunar|arrow)[ _-]?(lake|rapids)|apple m\d"
    r"|genuineintel|authenticamd|tesla|jetson|orin|t4|a100|h100|ampere|hopper|turing|gemmini|raspberry"
    r")(?![a-z0-9])"
)


def python_files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*.py") if "_shipped" not in p.parts)


@pytest.fixture(autouse=True, scope="module")
def _forget_files() -> Iterator[None]:
    """Drop the parsed files afterwards: every later garbage collection would visit their half a million nodes."""
    yield
    nodes.cache_clear()


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', '?')}"


def package_of(path: Path) -> str:
    return path.relative_to(EDGEQ).parts[0].removesuffix(".py")


def imports(path: Path, root: Path) -> Iterator[tuple[ast.AST, str]]:
    """Yield every dotted name that a file imports, with relative imports resolved below `root`."""
    package = (*path.relative_to(root).parts[:-1],)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                yield node, f"{module}.{alias.name}"


def everything_under_edgeq() -> list[Path]:
    return python_files(EDGEQ)


def everything_shipped() -> list[Path]:
    return python_files(EDGEQ) + python_files(RUNTIME)


def test_every_package_has_a_layer() -> None:
    unknown = sorted({package_of(p) for p in everything_under_edgeq()} - set(LAYER_OF))
    assert not unknown, f"give {unknown} a layer in LAYERS and in docs/architecture.md"


def test_the_documented_layers_are_these() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    drawn = {int(layer): set(re.findall(r"`(\w+)`", packages)) for layer, packages in rows}
    outermost = len(LAYERS) - 1  # the page describes it in words
    assert sorted(drawn) == list(range(len(LAYERS)))
    assert {f: r for f, r in drawn.items() if f != outermost} == dict(enumerate(LAYERS[:outermost]))


def test_packages_import_only_from_layers_below() -> None:
    wrong = []
    for path in everything_under_edgeq():
        own = package_of(path)
        for node, name in imports(path, REPOSITORY):
            parts = name.split(".")
            if parts[0] != "edgeq" or len(parts) == 1 or name == "edgeq.__version__":
                continue
            other = parts[1]
            if other != own and LAYER_OF.get(other, len(LAYERS)) >= LAYER_OF[own]:
                wrong.append(f"{where(path, node)}: {own} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    """No module imports itself, directly or through others. Imports inside functions count.

    edgeq/__init__.py is left out, because its lazy exports lead everywhere.
    """
    modules = {".".join(p.relative_to(REPOSITORY).with_suffix("").parts): p for p in everything_under_edgeq()}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items() if name != "edgeq.__init__"}
    imported = {module: set(edges(path, module, set(modules))) for module, path in modules.items()}
    assert circles(imported) == [], "let one of them know nothing of the other"


def edges(path: Path, module: str, modules: set[str], root: Path = REPOSITORY) -> Iterator[str]:
    for _, name in imports(path, root):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name and name != module:
            yield name


def device_imports() -> dict[str, set[str]]:
    """Return which modules of edgeq_device each of them imports. Imports inside functions count."""
    files = python_files(RUNTIME / "edgeq_device")
    modules = {".".join(p.relative_to(RUNTIME).with_suffix("").parts).removesuffix(".__init__"): p for p in files}
    return {module: set(edges(path, module, set(modules), RUNTIME)) for module, path in modules.items()}


def test_no_modules_of_edgeq_device_import_each_other() -> None:
    assert circles(device_imports()) == [], "let one of them know nothing of the other"


def test_the_rooms_of_edgeq_device_only_look_down() -> None:
    """The catalog loads the adapters of engines by name. They are in its own room, so that is no look upwards."""
    wrong = []
    for module, imported in device_imports().items():
        for name in sorted(imported - {"edgeq_device"}):
            room, lower = (ROOMS.index(path.split(".")[1]) for path in (module, name))
            if lower > room:
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_documented_rooms_are_these() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
    table = text[text.index("| room |") :].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert tuple(room for row in rows for room in re.findall(r"`(\w+)`", row)) == ROOMS


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules that import each other, directly or through others.

    The function removes modules that import nothing, or that nothing imports, until no such module is left.
    """
    left = dict(imported)
    while True:
        read = set().union(*left.values()) if left else set()
        kept = {m: found & left.keys() for m, found in left.items() if m in read and found & left.keys()}
        if kept == left:
            return [sorted(left)] if left else []
        left = kept


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_only_the_outermost_modules_import_edgeq_whole() -> None:
    wrong = [
        where(path, node)
        for path in everything_under_edgeq()
        for node, name in imports(path, REPOSITORY)
        if name == "edgeq" and LAYER_OF[package_of(path)] < LAYER_OF["cli"]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_device_side_stands_alone() -> None:
    allowed = sys.stdlib_module_names | {"numpy", "onnxruntime", "edgeq_device"}
    wrong = [
        f"{where(path, node)}: imports {name}"
        for path in python_files(RUNTIME)
        for node, name in imports(path, RUNTIME)
        if name.split(".")[0] not in allowed
        # for images, if Pillow is installed
        and not (path.name in ("steps.py", "draw_pillow.py") and name.startswith("PIL.Image") and node.col_offset)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_device_side_is_python_3_9() -> None:
    wrong = []
    for path in python_files(RUNTIME):
        parsed = ast.parse(path.read_text("utf-8"), str(path), feature_version=(3, 9))
        postponed = any(name == "__future__.annotations" for _, name in imports(path, RUNTIME))
        for node in ast.walk(parsed):
            if isinstance(node, ast.Match) or type(node).__name__ == "TryStar":
                wrong.append(f"{where(path, node)}: {type(node).__name__} is newer than 3.9")
            if isinstance(node, ast.Call):
                late = {k.arg for k in node.keywords} & {"kw_only", "slots"}
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                if (called == "dataclass" and late) or (called == "zip" and node.keywords):
                    wrong.append(f"{where(path, node)}: a keyword newer than 3.9")
            if isinstance(node, (ast.AnnAssign, ast.arg)) and node.annotation is not None and not postponed:
                wrong.append(f"{where(path, node)}: annotations need `from __future__ import annotations`")
    assert not wrong, "\n".join(wrong)


def test_nothing_unpickles() -> None:
    wrong = []
    for path in everything_shipped():
        wrong += [
            f"{where(path, n)}: imports {name}"
            for n, name in imports(path, REPOSITORY)
            if name.split(".")[0] in PICKLES
        ]
        for node in nodes(path):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                    wrong.append(f"{where(path, node.value)}: allow_pickle is not False")
            elif isinstance(node, ast.Name) and node.id in {"eval", "exec"}:
                wrong.append(f"{where(path, node)}: {node.id}")
    assert not wrong, "\n".join(wrong)


def test_temporary_folders_have_locks() -> None:
    """Without a lock, the next run could not tell whether a folder is still in use, and it would stay after a kill."""
    makers = {"TemporaryDirectory", "mkdtemp", "mkstemp", "NamedTemporaryFile"}
    wrong = [
        f"{where(path, node)}: {name} without dir: use edgeq_device.system.places"
        for path in everything_shipped()
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and (name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in makers
        and "dir" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not wrong, "\n".join(wrong)


# Functions that search PATH as the system does, so they find programs in the working directory too.
SEARCHES_PATH = re.compile(
    r"shutil\.which|os\.(system|popen|startfile|posix_spawnp|exec[lv]pe?|spawn[lv]pe?)|ctypes\.util\.find_library"
    r"|platform\.(processor|uname)|uuid\.(getnode|uuid1)|webbrowser\.\w+|distutils\.spawn\.\w+"
)


def test_only_find_program_searches_path() -> None:
    """Programs come from `edgeq_device.system.programs.find_program`, and each child process gets a checked
    environment.
    """
    wrong = []
    for path in everything_shipped():
        root = RUNTIME if RUNTIME in path.parents else REPOSITORY
        wrong += [f"{where(path, n)}: {name}" for n, name in imports(path, root) if SEARCHES_PATH.fullmatch(name)]
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and SEARCHES_PATH.fullmatch(ast.unparse(node)):
                wrong.append(f"{where(path, node)}: {ast.unparse(node)}")
            if not isinstance(node, ast.Call):
                continue
            if re.fullmatch(r"subprocess\.(run|Popen|call|check_call|check_output)", ast.unparse(node.func)):
                names = {keyword.arg for keyword in node.keywords}
                if "shell" in names or not names & {"env", None}:
                    wrong.append(f"{where(path, node)}: pass env=child_environment(), and no shell")
                first = next((n for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)), None)
                if isinstance(node.args[0], ast.List) and first is node.args[0].elts[0]:
                    wrong.append(f"{where(path, node)}: {ast.unparse(first)} is not found by find_program")
    assert not wrong, "\n".join(wrong)


def test_no_error_is_swallowed() -> None:
    wrong = []
    for path in everything_shipped():
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler):
                if node.type is None:
                    wrong.append(f"{where(path, node)}: bare except")
                if all(
                    isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
                    for s in node.body
                ):
                    wrong.append(f"{where(path, node)}: except that does nothing")
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "suppress":
                broad = {ast.unparse(a) for a in node.args} & {"Exception", "BaseException"}
                wrong += [f"{where(path, node)}: suppress({name})" for name in sorted(broad)]
    assert not wrong, "\n".join(wrong)


def conditions(module: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in module:
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.match_case):
            yield node.pattern
        elif isinstance(node, ast.Compare):
            yield node


def hardware_names(module: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    for condition in conditions(module):
        for node in ast.walk(condition):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = HARDWARE.search(node.value.lower())
                if found:
                    yield node, found.group(1)


def test_no_condition_names_hardware() -> None:
    """No condition names hardware: its properties are in profiles/ and targets/, where contributors can add a board."""
    wrong = sorted(
        {
            f"{where(path, node)}: a condition names {name!r}"
            for path in everything_under_edgeq()
            for node, name in hardware_names(nodes(path))
        }
    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("if arch == 'arm64': pass", {"arm64"}),
        ("x = 1 if 'avx512_vnni' in features else 2", {"avx512_vnni"}),
        ("[f for f in flags if f.startswith('sse4')]", {"sse4"}),
        ("match cpu:\n    case 'Cortex-A72': pass", {"cortex"}),
        ("ok = name != 'Zen 4'", {"zen"}),
        ("if method == 'entropy': pass", set()),
        ("spellings = {'amd64': 'x86_64'}", set()),
    ],
)
def test_hardware_names_are_recognised(source: str, names: set[str]) -> None:
    assert {name for _, name in hardware_names(ast.walk(ast.parse(source)))} == names


OWN_PACKAGES = re.compile(r"edgeq\.backends\.(?!base\b)\w+")
BACKENDS = {path.stem for path in (REPOSITORY / "targets" / "backends").glob("*.toml")}
ENGINES = {path.stem for path in (REPOSITORY / "targets" / "engines").glob("*.toml")}
# Commands for one backend. The old interfaces (`compat`) name the backends that they stood for.
OF_ONE_BACKEND = {"cli/convert.py": "edgeq.backends.systolic.emit_c"}


def core_files() -> list[Path]:
    return [path for path in everything_under_edgeq() if package_of(path) not in {"backends", "compat"}]


def test_the_core_imports_no_backend() -> None:
    """The core imports no backend: it finds backends by their entry points and calls only methods of `Backend`."""
    wrong = [
        f"{where(path, node)}: imports {name}"
        for path in core_files()
        for node, name in imports(path, REPOSITORY)
        if OWN_PACKAGES.match(name)
        and not name.startswith(OF_ONE_BACKEND.get(path.relative_to(EDGEQ).as_posix(), "nothing"))
    ]
    assert not wrong, "\n".join(wrong)


def named_parts(module: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    """Yield the names of backends and engines in conditions.

    "cpu" is also a kind of device and "onnxruntime" also a package. These two count only in comparisons with a backend
    or an engine.
    """
    for condition in conditions(module):
        compared = ast.unparse(condition).lower()
        asked = "backend" in compared or "engine.name" in compared
        known = BACKENDS | ENGINES if asked else (BACKENDS | ENGINES) - {"cpu", "onnxruntime"}
        for node in ast.walk(condition):
            if isinstance(node, ast.Constant) and node.value in known:
                yield node, str(node.value)


def test_no_condition_of_the_core_names_a_backend_or_an_engine() -> None:
    wrong = {
        f"{where(path, node)}: a condition names {name!r}"
        for path in core_files()
        for node, name in named_parts(nodes(path))
    }
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("if target.backend != 'cpu': pass", {"cpu"}),
        ("x = 1 if 'systolic' in tables else 2", {"systolic"}),
        ("ok = engine.name == 'onnxruntime'", {"onnxruntime"}),
        ("if artifact.device == 'cpu': pass", set()),
        ("SIMULATORS = {'qnn': open_engine}", set()),
    ],
)
def test_names_of_backends_and_engines_are_recognised(source: str, names: set[str]) -> None:
    assert {name for _, name in named_parts(ast.walk(ast.parse(source)))} == names


# Code that finds modules by name: extensions, lazy exports, commands.
FINDERS = {"util/registry.py", "__init__.py", "cli/__init__.py"}


def test_no_import_hides_in_a_string() -> None:
    """No module imports edgeq's modules by name: the tests of layers and circles would not see such an import."""
    wrong = []
    for path in everything_under_edgeq():
        if path.relative_to(EDGEQ).as_posix() in FINDERS or package_of(path) == "compat":
            continue
        for node in nodes(path):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in {"importlib.import_module", "import_module", "__import__"} and "edgeq" in ast.unparse(node):
                wrong.append(f"{where(path, node)}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for child, inner in sorted(command.commands.items()):
            yield from leaves(f"{name} {child}", inner)
    else:
        yield name, command


def test_every_command_file_is_listed() -> None:
    files = {p.stem for p in (EDGEQ / "cli").glob("*.py") if not p.stem.startswith("_")}
    assert files == set(FILES), "name it in FILES, edgeq/cli/__init__.py"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself_and_speaks_json(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert isinstance(command, click.Command)
    assert COMMANDS[name].endswith(".")
    for full, leaf in leaves(name, command):
        assert leaf.help, f"edgeq {full} has no help"
        options = {o for p in leaf.params for o in p.opts}
        assert {"--json", "--quiet", "--verbose"} <= options, f"edgeq {full} does not use @common"
        for parameter in leaf.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"edgeq {full} {parameter.opts[0]} has no help"


def test_help_imports_nothing_heavy() -> None:
    """`edgeq --help` starts fast: onnx, onnxruntime, numpy and rich are imported only when a command needs them."""
    heavy = {"numpy", "onnx", "onnxruntime", "onnx_ir", "rich", "PIL", "sympy", "cpuinfo", "dask", "distributed"}
    wrong = []
    for path in (EDGEQ / "__init__.py", EDGEQ / "__main__.py", *sorted((EDGEQ / "cli").glob("*.py"))):
        for node in ast.parse(path.read_text("utf-8"), str(path)).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{where(path, node)}: {n} at module level" for n in names if n.split(".")[0] in heavy]
    assert not wrong, "\n".join(wrong)


# A reader of the house: names, lists of parameters, comments. `tests/house.py` explains each count.


def test_names_are_nouns() -> None:
    places, total = house.names_without_a_noun()
    assert len(places) <= 0.015 * total, "name these values by what they are:\n" + "\n".join(places)


# The device side cannot import edgeq, so it has its own errors, and edgeq maps each to the error of the same name.
ERRORS_OF_BOTH = {
    "BudgetError",
    "BundleError",
    "CheckFailedError",
    "DataError",
    "OutputError",
    "RuntimeUnavailableError",
    "UsageError",
}


def test_each_class_has_a_name_of_its_own() -> None:
    repeated = {name: places for name, places in house.classes_defined_twice().items() if name not in ERRORS_OF_BOTH}
    assert len(repeated) <= 8 - len(ERRORS_OF_BOTH), repeated


def test_functions_take_few_parameters() -> None:
    """Three functions that users call may be longer, because each argument is one that a user can type."""
    places = house.long_parameter_lists()
    assert len(places) <= 3, "group the values that belong together:\n" + "\n".join(places)


def test_only_the_command_line_names_options() -> None:
    """Python users have arguments instead, so a text writes ⟨max_drop⟩, and whoever shows it chooses the words."""
    places = house.lines_with_options()
    assert not places, "\n".join(places)


def test_comments_give_reasons_often_enough() -> None:
    assert house.share_of_comments() >= 0.04


def test_files_have_one_idea() -> None:
    places = house.files_of_several_ideas()
    assert len(places) <= 15, "part these files by their ideas:\n" + "\n".join(places)


def test_test_names_say_what_acts() -> None:
    places = house.headless_test_names()
    assert not places, "begin these names with what acts:\n" + "\n".join(places)


def test_packages_say_what_they_are_for() -> None:
    places = house.silent_packages()
    assert not places, "write a docstring in:\n" + "\n".join(places)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f():\n" + "    pass\n" * 12 + "def g():\n" + "    pass\n" * 12, 2),
        ("def f():\n" + "    pass\n" * 12 + "def g():\n" + "    f()\n" * 12, 1),
        ("def f():\n    pass\nLIMIT = 1\n", 0),
    ],
)
def test_ideas_are_counted_by_references(source: str, count: int) -> None:
    assert house.count_ideas(ast.parse(source)) == count


def test_the_workstation_names_no_family_of_heads() -> None:
    """A family is found by its file name, so a new one needs no change elsewhere."""
    importing = [
        str(path.relative_to(REPOSITORY))
        for path in python_files(EDGEQ)
        if re.search(r"^\s*from edgeq_device\.answers\.families[. ]", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert importing == []
