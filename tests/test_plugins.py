"""What other packages add: `plugin_package` brings one of each; broken ones; rules by a call."""
# pyright: reportMissingImports=false

import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright import plugins
from shardwright.errors import PlanError, PluginError, UsageError
from shardwright.planner import solvers
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.contract.styles import style_of
from shardwright.planner.devices import device
from shardwright.planner.exports import exports
from shardwright.rules import added
from shardwright.rules.call import OpCall
from shardwright.rules.testing import check_rule
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.modules.layers import apply_module
from tests import planning
from tests.cli.conftest import model, run  # noqa: F401 fixtures
from tests.planner.equal import assert_equal, features, planned
from tests.planning import as_text

PACKAGE = Path(__file__).parent / "plugin_package"


def install(monkeypatch, folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """What pip leaves of a package: importlib.metadata finds its entry points in `folder`."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in groups.items()
        )
    )
    monkeypatch.syspath_prepend(folder)
    added.installed.cache_clear()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Rules of one test are not those of the next."""
    yield
    added.REGISTERED.clear()
    added.installed.cache_clear()


@pytest.fixture
def example(monkeypatch, tmp_path):
    """The package's layers, while it is importable but its entry points are not there yet."""
    monkeypatch.syspath_prepend(PACKAGE)
    added.installed.cache_clear()
    import shardwright_example.layers as layers

    return layers


@pytest.fixture
def installed(example, monkeypatch, tmp_path):
    """The package's layers, with the entry points of its pyproject.toml."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    install(monkeypatch, tmp_path, project["name"], project["entry-points"])
    return example


def gated_mlp(layers) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), layers.Gate(16), nn.Linear(16, 8)).double()


# --- one of each


def test_without_its_rule_an_op_stays_whole_and_the_plan_says_so(example) -> None:
    plan = planned(gated_mlp(example), features(8), 2)
    assert plan.opaque == {"shardwright_example::gated": 1}
    assert not plan.modules["1"].parameters
    (reason,) = [r.reason for r in plan.replicated if r.parameter == "1.weight"]
    assert reason.startswith("shardwright_example::gated in '1'") and "has no rule" in reason
    assert_equal(gated_mlp(example), features(8), plan)


@pytest.mark.parametrize("phase", ["prefill", "train"])
def test_rule_and_layer_style_of_a_package(installed, phase: str) -> None:
    plan = planned(gated_mlp(installed), features(8), 2, phase=phase)
    assert plan.opaque == {}
    gate = plan.modules["1"]
    assert gate.layer == "shardwright-example:ParallelGate"
    assert gate.parameters["weight"].placement == "16@tp"
    assert "channels 16@tp" in as_text(plan)
    assert_equal(gated_mlp(installed), features(8), plan)


def test_a_module_becomes_the_class_of_its_style(installed) -> None:
    class Subclass(installed.Gate):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    class OwnCode(installed.Gate):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.weight)

    plan = planned(gated_mlp(installed), features(8), 2)
    spec, mesh = plan.modules["1"], Mesh.shape_only({"tp": (0, 2)})
    for gate in (installed.Gate(16), Subclass(16)):
        apply_module(gate, spec, mesh)
        assert isinstance(gate, installed.LocalGate) and gate.channels == 8
        assert type(gate).__name__.startswith("ParallelGate")
    with pytest.raises(PlanError, match="computes by itself what ParallelGate replaces"):
        apply_module(OwnCode(16), spec, mesh)
    with pytest.raises(PlanError, match="is a Linear, which cannot become a ParallelGate"):
        apply_module(nn.Linear(2, 2), spec, mesh)


def test_a_plan_says_which_package_its_style_is_of(installed, monkeypatch, tmp_path: Path) -> None:
    plan = planned(gated_mlp(installed), features(8), 2)
    plan.save(tmp_path / "plan.json")
    monkeypatch.undo()  # on a machine without it
    plan = Plan.load(tmp_path / "plan.json")
    assert "part 16@tp" in as_text(plan)
    with pytest.raises(PlanError) as error:
        assert_equal(gated_mlp(installed), features(8), plan)
    assert str(error.value) == (
        "layer style 'ParallelGate' is of package shardwright-example: install it on each rank"
    )


@pytest.mark.usefixtures("installed")
def test_solver_device_and_format_of_a_package(run, model: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "plan.json"
    done = run("plan", model, "--tp", 2, "--solver", "patient", "--device", "slow-ring", "-o", path)
    assert done.exit_code == 0, done.stderr
    plan = Plan.load(path)
    assert (plan.solver.name, plan.workload.device) == ("patient", "slow-ring")
    assert plan.predicted.time_ns > planning.plan(str(model), 2).predicted.time_ns
    done = run("export", path, "--to", "lines")
    assert "model.embed_tokens.weight = 256@tp, 64\n" in done.stdout
    assert run("export", path, "--to", "lines", "-o", tmp_path / "plan.txt").stdout == ""
    assert (tmp_path / "plan.txt").read_text() == done.stdout
    text = shardwright.export(plan, "lines", separator=": ")
    assert "lm_head.weight: 256@tp, 64\n" in str(text)


@pytest.mark.usefixtures("installed")
def test_what_is_installed_is_listed() -> None:
    assert solvers.names() == ["backtracking", "cpsat", "patient"]
    formats = ["csv", "lines", "markdown", "pull-request", "torch", "transformers", "vllm"]
    assert exports.names() == formats
    assert "slow-ring" in device.names() and device.device("slow-ring").source == "made up"
    with pytest.raises(UsageError, match="unknown format 'toml'; installed: csv, lines, mark"):
        shardwright.export("plan.json", "toml")
    with pytest.raises(UsageError, match="unknown device 'abacus'; known: .*slow-ring"):
        device.device("abacus")


# --- broken ones

BROKEN = {
    "shardwright.rules": {"aten": "broken_example:RULES", "broken": "broken_example:RULES"},
    "shardwright.layers": {"Broken": "broken_example:STYLE"},
    "shardwright.solvers": {"broken": "broken_example:solve"},
    "shardwright.devices": {"broken": "broken_example:PROFILE"},
    "shardwright.emitters": {"broken": "broken_example:emit"},
}
WHY = (
    "package broken-example does not load: 'broken_example:{}' for shardwright.{}: "
    "ModuleNotFoundError: No module named 'broken_example'; mend it or uninstall it"
)


@pytest.mark.parametrize(
    ("kind", "what", "ask"),
    [
        ("rules", "RULES", lambda: added.added("broken::op")),
        ("layers", "STYLE", lambda: style_of("broken-example:Broken")),
        ("solvers", "solve", lambda: solvers.load("broken")),
        ("devices", "PROFILE", lambda: device.device("broken")),
        ("emitters", "emit", lambda: exports.emitter("broken")),
    ],
)
def test_a_broken_package_is_one_line(monkeypatch, tmp_path: Path, kind, what, ask) -> None:
    install(monkeypatch, tmp_path, "broken-example", BROKEN)
    with pytest.raises(PluginError) as error:
        ask()
    assert str(error.value) == WHY.format(what, kind)


def test_a_broken_package_breaks_no_plan_that_does_not_need_it(
    monkeypatch, tmp_path: Path, caplog
) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()
    before = planned(module, features(8), 2).to_json()
    groups = {group: dict(entries) for group, entries in BROKEN.items()}
    del groups["shardwright.rules"]["aten"]  # that one is asked for by each op without a rule
    install(monkeypatch, tmp_path, "broken-example", groups)
    with caplog.at_level(logging.WARNING, "shardwright"):
        assert planned(module, features(8), 2).to_json() == before
    assert {record.getMessage() for record in caplog.records} == {WHY.format("STYLE", "layers")}


def test_two_packages_with_one_name(monkeypatch, tmp_path: Path) -> None:
    for package in ("one", "other"):
        install(
            monkeypatch,
            tmp_path / package,
            package,
            {"shardwright.solvers": {"mine": "json:loads"}},
        )
    with pytest.raises(PluginError) as error:
        solvers.load("mine")
    assert (
        str(error.value) == "one and other both bring 'mine' for shardwright.solvers: uninstall one"
    )
    assert plugins.load("solvers", "mine", "other") is not None


@pytest.mark.parametrize(
    ("group", "name", "value", "ask", "message"),
    [
        (
            "rules",
            "aten",
            "string:digits",
            lambda: added.added("frobnicate"),
            "are no dict of rules",
        ),
        (
            "layers",
            "x",
            "string:digits",
            lambda: style_of("odd:x"),
            "is no LayerStyle: '01",
        ),
        (
            "emitters",
            "x",
            "builtins:len",
            lambda: shardwright.export("x", "x"),
            "cannot read plan x",
        ),
        ("devices", "x", "math:pi", lambda: device.device("x"), "profile x is not valid"),
    ],
)
def test_what_is_not_what_it_should_be(
    monkeypatch, tmp_path: Path, group, name, value, ask, message
) -> None:
    install(monkeypatch, tmp_path, "odd", {f"shardwright.{group}": {name: value}})
    with pytest.raises(shardwright.ShardwrightError, match=message):
        ask()


# --- rules by a call


@pytest.mark.parametrize("form", ["op", "packet", "overload", "name"])
def test_register_rule(example, form: str) -> None:
    from shardwright_example.ops import RULES, gated

    packet = torch.ops.shardwright_example.gated
    forms = {
        "op": gated,
        "packet": packet,
        "overload": packet.default,
        "name": "shardwright_example::gated",
    }
    shardwright.register_rule(forms[form], RULES["gated"])
    plan = planned(gated_mlp(example), features(8), 2)
    assert plan.opaque == {} and plan.modules["1"].layer == "LocalModule"
    with pytest.raises(UsageError, match="has a rule: replace=True puts yours in its place"):
        shardwright.register_rule(gated, RULES["gated"])
    shardwright.register_rule(gated, lambda call: None, replace=True)
    assert planned(gated_mlp(example), features(8), 2).opaque == {"shardwright_example::gated": 1}


def test_register_rule_in_the_place_of_ours(example) -> None:
    with pytest.raises(UsageError, match="op 'linear' has a rule"):
        shardwright.register_rule("aten::linear", "... i, o i, o -> ... o")
    shardwright.register_rule("aten::linear", lambda call: None, replace=True)
    assert "linear" in planned(gated_mlp(example), features(8), 2).opaque


def test_a_rule_of_a_package_counts_as_one(installed) -> None:
    with pytest.raises(UsageError, match="'shardwright_example::gated' has a rule"):
        shardwright.register_rule("shardwright_example::gated", "... h, h -> ... h")


def test_an_added_rule_that_does_not_fit_a_call(example) -> None:
    shardwright.register_rule("shardwright_example::gated", "b h, h -> b h")
    with pytest.raises(PluginError, match="rule of op 'shardwright_example::gated' does not fit"):
        planned(gated_mlp(example), features(8), 2)


def _name_of_argument(call: OpCall) -> str:
    return f"... h, h -> ... h | whole {call.arguments['width']}"


def test_a_maker_that_asks_for_what_is_not_there(example) -> None:
    shardwright.register_rule("shardwright_example::gated", _name_of_argument)
    with pytest.raises(PluginError, match="does not fit a call of it: 'width'"):
        planned(gated_mlp(example), features(8), 2)


@pytest.mark.parametrize(
    ("op", "rule", "message"),
    [
        (3, "a -> a", "no op: 3; give a torch.library.custom_op, torch.ops.namespace.name, or"),
        ("gated", "a -> a", "no op: 'gated'; give a torch.library.custom_op"),
        ("nowhere::gated", "a -> a", "no op 'nowhere::gated': import what defines it first"),
        (
            "shardwright_example::gated",
            "a, a",
            "'shardwright_example::gated' cannot be read: no '->'",
        ),
        ("shardwright_example::gated", "a, a -> a | sums a", "unknown clause 'sums' in rule"),
        (
            "shardwright_example::gated",
            "a -> a",
            "is for 1 tensors in and 1 out: 'a -> a'; the op is",
        ),
        ("shardwright_example::gated", "a, a -> a, a", "is for 2 tensors in and 2 out"),
        ("shardwright_example::gated", 7, "is neither text nor a function: 7"),
        ("shardwright_example::gated", "a, v -> a | lookup v", "only an nn.Embedding can be"),
        ("aten::copy_", "a, a -> a", "op 'copy_' changes its arguments"),
    ],
)
def test_what_is_no_rule(example, op: object, rule: object, message: str) -> None:
    with pytest.raises(UsageError) as error:
        shardwright.register_rule(op, rule)  # type: ignore[arg-type]
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_composite_op_with_a_rule_is_not_taken_apart() -> None:
    """Of two results, so that each is wrapped as what model code sees."""
    library = torch.library.Library("shardwright_composite", "DEF")  # noqa: TOR901
    library.define("both(Tensor x, Tensor w) -> (Tensor, Tensor)")
    library.impl("both", lambda x, w: (x * w, x + w), "CompositeImplicitAutograd")
    both = torch.ops.shardwright_composite.both

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            one, other = both(x, self.weight)
            return one * torch.tanh(other)

    module = nn.Sequential(nn.Linear(8, 16), Both(), nn.Linear(16, 8)).double()
    shardwright.register_rule(both, "... h, h -> ... h, ... h")
    plan = planned(module, features(8), 2)
    assert plan.modules["1"].parameters["weight"].placement == "16@tp"
    assert_equal(module, features(8), plan)
    shardwright.register_rule(both, lambda call: None, replace=True)
    assert "shardwright_composite::both" in planned(module, features(8), 2).opaque


# --- the test of a rule


def test_check_rule(example) -> None:
    from shardwright_example.ops import RULES, gated

    x, gate = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    with pytest.raises(UsageError, match="'shardwright_example::gated' has no rule for this call"):
        check_rule(gated, x, gate)
    shardwright.register_rule(gated, RULES["gated"])
    check_rule(gated, x, gate=gate)
    with pytest.raises(UsageError, match=r"axes \['h'\] of rule .* have size 1 here"):
        check_rule(gated, x[..., :1], gate[:1])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("... h, h -> ... h | linear 0+1", "not linear in operands [0, 1]"),
        ("... h, g -> ... h | sum g", "axis 'h' on 2 ranks: "),
    ],
)
def test_check_rule_finds_a_wrong_one(example, rule: str, message: str) -> None:
    shardwright.register_rule("shardwright_example::gated", rule)
    x, gate = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    with pytest.raises(AssertionError) as error:
        check_rule("shardwright_example::gated", x, gate)
    assert message in str(error.value)


def test_check_rule_tries_gradients(example) -> None:
    """Right ahead, wrong back: the gradient of a part is not part of the gradient."""

    @torch.library.custom_op("shardwright_wrong::gradient", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.clone()

    op.register_autograd(lambda ctx, grad: grad.cumsum(0))
    shardwright.register_rule(op, "a b -> a b")
    x = torch.randn(4, 5, dtype=torch.float64)
    check_rule(op, x, gradients=False)
    with pytest.raises(AssertionError, match="rule 'a b -> a b', axis 'a' on 2 ranks"):
        check_rule(op, x)
