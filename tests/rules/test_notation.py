"""The notation of rules: what is read, what is refused, and how it takes the shapes of a call."""

import pytest

from shardwright.rules.call import OpCall, Operand
from shardwright.rules.notation import DoesNotFit, Rule, bind, expr_size, letters, parse
from shardwright.rules.registry import TABLE, rule_for
from shardwright.rules.shape import AFTER, BEFORE, KEPT, Factor, factor_alike

VALID = {
    "... i, o i, o -> ... o | sum i | linear 0+2 1+2": None,
    "v e, ... -> ... e | lookup v | linear 0": None,
    "b h q d, b h k d, b h k e -> b h q e | whole d e k q | linear 2": None,
    "k, k -> ": None,
    "1 a -> a 1": None,
    "s0 s1 -> a | free s0 s1": None,
    "a -> b, b | whole a b": None,
    "... r c -> ... r c | whole c r | linear 0": None,
    " -> a": None,
    "(a b) -> a b | size a=2 b=3": "(a b) -> a b",
    "((a)) -> a": "a -> a",
    "(a + (b c)) d->a d": "(a + (b c)) d -> a d",
    "(a + b) -> a, b": None,
    "a -> a | whole | linear 0 | whole a": "a -> a | whole a | linear 0",
    "...,...->...": "..., ... -> ...",
    " -> a | linear zero | size a=4": " -> a | linear zero",
    "a -> a | linear 0 zero": None,
    "x b, x c -> b c | sum x | linear 0 1 | size x=4": "x b, x c -> b c | sum x | linear 0 1",
}


@pytest.mark.parametrize("text", VALID)
def test_text_and_back(text: str) -> None:
    assert str(parse(text)) == (VALID[text] or text)


@pytest.mark.parametrize("text", VALID)
def test_what_is_printed_is_read_again(text: str) -> None:
    back = parse(str(parse(text)))
    rule = parse(text)
    assert (back.operands, back.results, back.linear) == (rule.operands, rule.results, rule.linear)
    assert back.immovable() == rule.immovable()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "no '->' in rule 'a b'"),
        ("a -> a | sums a", "unknown clause 'sums'"),
        ("a -> a | ", "unknown clause ''"),
        ("a -> a | sum b", "axes ['b'] are only in the clauses"),
        ("a -> a | free b", "axes ['b'] are only in the clauses"),
        ("a -> | sum a | whole a", "two clauses name ['a']"),
        ("a -> a | sum a", "axes ['a'] are lost and in a result"),
        ("a -> a | lookup a", "axes ['a'] are lost and in a result"),
        ("a -> a | free a", "axes ['a'] are lost and in a result"),
        ("a -> a | linear 1", "names an operand that is not there"),
        ("a -> a | linear x", "invalid literal"),
        ("a -> a | size a", "invalid literal"),
        ("(a b -> a b", "'(' is not closed in '(a b'"),
        ("a b) -> a b", "cannot read ')' in 'a b)'"),
        ("a + b -> a b", "cannot read '+'"),
        ("(a +) -> a", "a part of a dim is empty"),
        ("() -> a", "a part of a dim is empty"),
        ("(... a) -> a", "a part of a dim is empty or '...'"),
        ("... a ... -> a", "'...' twice"),
        ("a 2 -> a", "cannot read '2'"),
        ("a, b* -> a", "cannot read '*'"),
    ],
)
def test_texts_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    assert message in str(error.value)


def fitted(text: str, operands: list, results: list) -> tuple[str, dict[str, int]]:
    rule = bind(parse(text), operands, results)
    return str(rule), dict(rule.sizes)


@pytest.mark.parametrize(
    ("text", "operands", "results", "bound", "sizes"),
    [
        ("a b -> b", [(2, 3)], [(3,)], "a b -> b", {"a": 2, "b": 3}),
        ("... i, o i -> ... o", [(5, 2, 3), (4, 3)], [(5, 2, 4)], ".2 .1 i, o i -> .2 .1 o",
         {".2": 5, ".1": 2, "o": 4, "i": 3}),
        ("..., ... -> ...", [(2, 3), (3,)], [(2, 3)], ".2 .1, .1 -> .2 .1", {".2": 2, ".1": 3}),
        ("..., ... -> ...", [(2, 1), (1, 3)], [(2, 3)], ".2 1, 1 .1 -> .2 .1", {".2": 2, ".1": 3}),
        ("..., ... -> ...", [(), (1,)], [(1,)], ", .1 -> .1", {".1": 1}),
        ("..., ... -> ...", [(0,), (1,)], [(0,)], ".1, 1 -> .1", {".1": 0}),
        ("... c, ... -> ...", [(4,), ()], [()], "c,  -> ", {"c": 4}),
        ("(a b) -> a b", [(6,)], [(2, 3)], "(a b) -> a b", {"a": 2, "b": 3}),
        ("(a b) -> a | size b=3", [(6,)], [(2,)], "(a b) -> a", {"a": 2, "b": 3}),
        ("(a b) c -> c | size a=2", [(6, 4)], [(4,)], "(a b) c -> c", {"a": 2, "b": 3, "c": 4}),
        ("(p + k) -> k", [(6,)], [(2,)], "(p + k) -> k", {"p": 4, "k": 2}),
        ("(a + (b c)) -> c | size b=2 a=1", [(7,)], [(3,)], "(a + (b c)) -> c",
         {"a": 1, "b": 2, "c": 3}),
        ("(a b) -> a b", [(0,)], [(0, 3)], "(a b) -> a b", {"a": 0, "b": 3}),
        ("1 a -> a 1", [(1, 5)], [(5, 1)], "1 a -> a 1", {"a": 5}),
        (" -> 1", [()], [(1,)], " -> 1", {}),
        (" -> a", [], [(4,)], " -> a", {"a": 4}),
    ],
)  # fmt: skip
def test_bind(text: str, operands: list, results: list, bound: str, sizes: dict) -> None:
    assert fitted(text, operands, results) == (bound, sizes)


@pytest.mark.parametrize(
    ("text", "operands", "results", "message"),
    [
        ("a -> a", [(2,), (2,)], [(2,)], "other operands than"),
        ("a -> a", [(2,)], [(2,), (2,)], "other operands than"),
        (" -> a", [(2,)], [(2,)], "other operands than"),
        ("a b -> a b", [(2,)], [(2,)], "'a b' do not fit shape (2,)"),
        ("... a b -> a b", [(2,)], [(2, 3)], "'... a b' do not fit shape (2,)"),
        ("a, a -> a", [(2,), (3,)], [(2,)], "'a' has size 2 in rule"),
        ("a, a -> a", [(1,), (3,)], [(1,)], "'a' has size 3 in rule"),
        ("(a b) -> a b", [(7,)], [(2, 3)], "'(a b)' has size 6"),
        ("(a b), c -> c", [(6,), (2,)], [(2,)], "does not say the sizes of ['a', 'b']"),
        ("(a b) -> b | size a=4", [(6,)], [(1,)], "'(a b)' has size 4"),
        ("a -> a | size a=1", [(5,)], [(5,)], "'a' has size 1"),
        ("1 -> a", [(2,)], [(2,)], "'1' has size 1"),
    ],
)
def test_shapes_that_do_not_fit(text: str, operands: list, results: list, message: str) -> None:
    with pytest.raises(DoesNotFit) as error:
        bind(parse(text), operands, results)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "immovable", "dropped"),
    [
        ("a k, k b -> a b | sum k", "", ""),
        ("v e, i -> i e | lookup v", "", ""),
        ("a b -> a", "b", "b"),
        ("a b -> a | whole a", "a b", "b"),
        ("(p0 + k + p2) -> k", "", "p0 p2"),
        ("(a m) -> a", "m", "m"),
        ("(p + (q r)) -> p", "", "q r"),
        ("(p + q) -> p | whole q", "q", "q"),
        ("s -> a | free s", "", "s"),
        ("a -> a b | whole b", "b", ""),
    ],
)
def test_what_may_not_move(text: str, immovable: str, dropped: str) -> None:
    rule = parse(text)
    assert rule.immovable() == set(immovable.split())
    assert rule.dropped() == set(dropped.split())


def test_letters_and_sizes_of_a_dim() -> None:
    (expr,) = parse("(a + (b c) + a + 1) -> a").operands[0]
    assert list(letters(expr)) == ["a", "b", "c", "a"]
    assert expr_size(expr, {"a": 2, "b": 3, "c": 5}) == 2 + 15 + 2 + 1


@pytest.mark.parametrize("op", [op for op, entry in TABLE.items() if isinstance(entry, str)])
def test_lines_of_the_tables(op: str) -> None:
    entry = TABLE[op]
    assert isinstance(entry, str) and isinstance(parse(entry), Rule)


def test_names_that_the_planner_relies_on() -> None:
    """`planner/strategies/op_strategies.py` finds by name what a slice or select cuts off."""
    assert (BEFORE, KEPT, AFTER) == ("p0", "k", "p2")
    arguments = {"self": Operand(0), "dim": 0, "start": 2, "end": 5, "step": 1}
    rule = rule_for(OpCall("slice", arguments, ((9, 4),), ((3, 4),)))
    assert str(rule) == "(p0 + k + p2) a1 -> k a1 | linear 0"
    arguments = {"self": Operand(0), "dim": 1, "index": -1}
    rule = rule_for(OpCall("select", arguments, ((9, 4),), ((9,),)))
    assert str(rule) == "a0 (p0 + k) -> a0 | linear 0"


def test_unforeseen_overloads_have_no_rule() -> None:
    pair = {"self": Operand(0), "mat2": Operand(1)}
    assert rule_for(OpCall("frobnicate", {}, (), ((2,),))) is None
    assert rule_for(OpCall("mm", pair, ((2, 3), (4, 5)), ((2, 5),))) is None, "shapes"
    assert rule_for(OpCall("permute", {"self": Operand(0)}, ((2, 3),), ((3, 2),))) is None, "dims"


def test_factors_of_a_reshape() -> None:
    assert factor_alike((6, 4), (2, 12)) == [Factor(0, 0, 2), Factor(0, 1, 3), Factor(1, 1, 4)]
    assert factor_alike((5, 1), (1, 5)) == [Factor(0, 1, 5)]
    assert factor_alike((), (1, 1)) == []
    assert factor_alike((7, 2, 3, 5), (7, 3, 2, 5)) == [
        Factor(0, 0, 7),
        Factor(1, None, 2),
        Factor(2, None, 3),
        Factor(None, 1, 3),
        Factor(None, 2, 2),
        Factor(3, 3, 5),
    ]
