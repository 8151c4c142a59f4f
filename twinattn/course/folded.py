"""Fold a Triton kernel for the constants of a call, as the compiler does; `twinattn.course.explain` prints it.

A kernel of ours is one body for every storage, mask and option. What a call fixes is a constant, so the compiler drops
the branches that do not apply before it begins. Here the same is done to the source:

    kernel of all calls                                     for a decode over pages
    if queries.positions is None:                           positions = context + rows // 4
        positions = context + rows // queries.GROUP
    else: ...
    place, ahead = keys.where.find(keys.where, tile, ...)   place, ahead = find_in_pages(where, tile, ...)

Constants are put in, also fields of NamedTuples and functions that these carry; branches on constants are decided;
loops over constants are unrolled; functions of one line are put in where they are called; arguments, assignments and
functions that nothing reads are dropped. What is left computes the same, and the tests run it.

Source: partial evaluation, Jones, Gomard and Sestoft 1993; Triton does it while it walks the same syntax tree.
"""

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

WIDTH = 118  # characters of a line, at most
OPERATORS: dict[type, Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv},
    **{ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.RShift: operator.rshift},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt},
    **{ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.Not: operator.not_, ast.USub: operator.neg},
}
_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8e4nv": "float8e4nv", "fp8e5": "float8e5"}
EFFECTS = ("store", "atomic_add", "gdc_wait", "gdc_launch_dependents")


class UnknownError(Exception):
    """An expression is no constant of the call."""


@dataclass(frozen=True)
class Runtime:
    """What a kernel learns when it runs: a pointer, a stride, a length; `path` says which, of an argument."""

    path: str = ""


@dataclass
class Folded:
    """A function for some constants: its name, the arguments that are left, and its lines."""

    name: str
    says: str
    where: str
    parameters: list[str]
    body: list[ast.stmt]

    @property
    def num_lines(self) -> int:
        """Its lines, without the two that say what it is."""
        return self.source().count("\n") - 1

    def source(self) -> str:
        """Return it as Python."""
        names = [ast.arg(name) for name in self.parameters]
        arguments = ast.arguments(posonlyargs=[], args=names, kwonlyargs=[], kw_defaults=[], defaults=[])
        function = ast.FunctionDef(self.name, arguments, self.body or [ast.Pass()], [], lineno=0)
        lines = ast.unparse(ast.fix_missing_locations(function)).splitlines()
        return "\n".join([f"# {self.where}", f"# {self.says}", *(part for line in lines for part in wrap(line))])


@dataclass
class Kernel:
    """A kernel for one call.

    Attributes:
        functions: the kernel and what it calls, in the order of the calls.
        called: the functions that a storage, a mask or a split carries: `keys.how.load` is `load_keys`.
        read: the fields of arguments that are read when it runs.
        num_fields: how many fields the arguments have.
        classes: the NamedTuples that the functions make, by the names that they have there.
    """

    functions: list[Folded] = field(default_factory=list)
    called: dict[str, Any] = field(default_factory=dict)
    read: dict[str, None] = field(default_factory=dict)
    num_fields: int = 0
    classes: dict[str, type] = field(default_factory=dict)


def wrap(line: str) -> list[str]:
    """Break a line that is too long, after a comma or before an operator within brackets."""
    if len(line) <= WIDTH:
        return [line]
    depth, at = 0, 0
    for i, letter in enumerate(line[:WIDTH]):
        depth += (letter in "([{") - (letter in ")]}")
        if depth and letter == " " and (line[i - 1] == "," or line[i + 1] in "&|+"):
            at = i
    indent = len(line) - len(line.lstrip())
    return [line[:at], *wrap(" " * (indent + 4) + line[at + 1 :])] if at > indent + 8 else [line]


def is_kernel_function(x: Any) -> bool:
    """Return whether something is a function of ours in Triton's language, compiled or interpreted."""
    return callable(getattr(x, "fn", None)) and getattr(x.fn, "__module__", "").startswith("fastattn.")


def is_constant(x: Any) -> bool:
    """Return whether something can be written into the source."""
    return x is None or type(x) in (bool, int, float, str)


def lift(x: Any, path: str, changing: frozenset[str]) -> Any:
    """Turn an argument into what is known of it: constants as they are, and `Runtime` for what is not known."""
    value = getattr(x, "value", x) if type(x).__name__ == "constexpr" else x
    if value is not x or x is None or isinstance(x, bool | str) or is_kernel_function(x):
        return value
    if isinstance(x, tuple):
        names = getattr(x, "_fields", range(len(x)))
        fields = [lift(one, f"{path}.{name}", changing) for name, one in zip(names, x, strict=True)]
        return type(x)(*fields) if hasattr(x, "_fields") else tuple(fields)
    is_one = type(x) is int and x == 1 and path.rpartition(".")[2] not in changing  # as Triton has it
    return 1 if is_one else Runtime(path)


def count(x: Any) -> int:
    """Count the fields of an argument."""
    return sum(map(count, x)) if isinstance(x, tuple) else 1


class Folder(ast.NodeTransformer):
    """Folds one function, whose names are known by `known`; what it calls is folded into `kernel`, too."""

    def __init__(self, function: Any, known: dict[str, Any], kernel: Kernel) -> None:
        self.globals, self.known, self.kernel = function.fn.__globals__, known, kernel

    def value(self, node: ast.expr) -> Any:
        """Return what an expression is, a constant, a function, a tuple or `Runtime`.

        Raises:
            UnknownError: if only the running kernel knows it.
        """
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                found = self.known.get(node.id, self.globals.get(node.id, Runtime()))
                return getattr(found, "value", found) if type(found).__name__ == "constexpr" else found
            case ast.Attribute():
                of = self.value(node.value)
                if isinstance(of, Runtime) or not hasattr(of, node.attr):
                    raise UnknownError
                return getattr(of, node.attr)
            case ast.Subscript():
                of, index = self.value(node.value), self.value(node.slice)
                if not isinstance(of, tuple) or type(index) is not int:
                    raise UnknownError
                return of[index]
            case ast.IfExp():
                return self.value(node.body if self.constant(node.test) else node.orelse)
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](self.constant(node.left), self.constant(node.right))
            case ast.UnaryOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](self.constant(node.operand))
            case ast.Compare(left, [test], [right]) if isinstance(test, ast.Is | ast.IsNot):
                return OPERATORS[type(test)](self.value(left), self.value(right))
            case ast.Compare(left, [test], [right]) if type(test) in OPERATORS:
                return OPERATORS[type(test)](self.constant(left), self.constant(right))
            case ast.BoolOp():
                return self.either(node)
            case ast.Call(ast.Name("max" | "min" as name), values, []):
                return {"max": max, "min": min}[name](map(self.constant, values))
            case ast.Call(ast.Name("next_power_of_2"), [size], []):
                return 1 << (self.constant(size) - 1).bit_length()
        raise UnknownError

    def constant(self, node: ast.expr) -> Any:
        """Return a constant; UnknownError for anything else."""
        found = self.value(node)
        if not is_constant(found):
            raise UnknownError
        return found

    def either(self, node: ast.BoolOp) -> Any:
        """Return an `and` or `or` that one side decides, or both."""
        decides = isinstance(node.op, ast.Or)
        is_known = True
        for each in node.values:
            try:
                if bool(self.constant(each)) == decides:
                    return decides
            except UnknownError:
                is_known = False
        if not is_known:
            raise UnknownError
        return not decides

    def name_of(self, found: type) -> str:
        """Return the name of a class, with a number if another one has it already."""
        name, classes = found.__name__, self.kernel.classes
        while classes.setdefault(name, found) is not found:
            name = f"{found.__name__}_{len(classes)}"
        return name

    # --- expressions ---

    def visit(self, node: ast.AST) -> Any:
        """Put in what is known of an expression."""
        if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store):
            try:
                found = self.value(node)
            except UnknownError:
                return super().visit(node)
            if is_constant(found):
                return ast.Constant(found)
            if is_kernel_function(found) and not isinstance(node, ast.Name):
                self.kernel.called.setdefault(ast.unparse(node), found)
                return ast.Name(found.fn.__name__, ast.Load())
            if isinstance(found, type) and found.__module__.startswith("fastattn."):
                return ast.Name(self.name_of(found), ast.Load())
            if type(found).__name__ == "dtype":
                return ast.parse(f"tl.{_NAMES.get(str(found), str(found))}", mode="eval").body
            if isinstance(found, Runtime) and isinstance(node, ast.Attribute | ast.Subscript):
                return node
        return super().visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Drop the sides of an `and` or `or` that decide nothing."""
        left = [side for side in map(self.visit, node.values) if not isinstance(side, ast.Constant)]
        if not left:
            return ast.Constant(isinstance(node.op, ast.And))
        return left[0] if len(left) == 1 else ast.BoolOp(node.op, left)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        """Choose a side."""
        try:
            return self.visit(node.body if self.constant(node.test) else node.orelse)
        except UnknownError:
            return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Drop a factor of 1, and 0 in a sum."""
        left, right = self.visit(node.left), self.visit(node.right)
        neutral = {ast.Mult: 1, ast.FloorDiv: 1, ast.Add: 0, ast.Sub: 0, ast.RShift: 0}.get(type(node.op))
        if neutral is not None and isinstance(right, ast.Constant) and right.value == neutral:
            return left
        is_sum = isinstance(node.op, ast.Mult | ast.Add)
        if is_sum and isinstance(left, ast.Constant) and left.value == neutral:
            return right
        return ast.BinOp(left, node.op, right)

    def visit_Call(self, node: ast.Call) -> Any:
        """Fold the function that is called, and put it in if it is one line."""
        try:
            function = self.value(node.func)
        except UnknownError:
            function = None
        if not is_kernel_function(function):
            return self.generic_visit(node)
        self.visit(node.func)  # notes who carries it
        given = inspect.signature(function.fn).bind(
            *node.args, **{keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        )
        known, nodes = {}, {}
        for name, parameter in inspect.signature(function.fn).parameters.items():
            argument = given.arguments.get(name)
            if argument is None:
                known[name] = parameter.default
                continue
            try:
                known[name] = self.value(argument)
            except UnknownError:
                known[name] = Runtime()
            nodes[name] = self.visit(deepcopy(argument))
        folded = fold(function, known, self.kernel)
        match folded.body:
            case []:
                return ast.Constant(None)
            case [ast.Return(value)] if value is not None and _can_put_in(value, nodes):
                return _PutIn(nodes).visit(deepcopy(value))
        if folded not in self.kernel.functions:
            self.kernel.functions.append(folded)
        return ast.Call(ast.Name(folded.name, ast.Load()), [nodes[name] for name in folded.parameters], [])

    # --- statements ---

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Fold statements one after the other."""
        return [left for statement in statements for left in self.statement(statement)]

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        """Fold one statement; what is decided leaves nothing, or one of its branches."""
        match node:
            case ast.If():
                return self.branch(node)
            case ast.For(iter=ast.Call(ast.Attribute(_, "static_range"), bounds)):
                turns = range(*map(self.constant, bounds))
                assert isinstance(node.target, ast.Name)
                lines: list[ast.stmt] = []
                for turn in turns:
                    self.known[node.target.id] = turn
                    lines += self.block(deepcopy(node.body))
                return lines
            case ast.For() | ast.While():
                for name in _assigned(node):
                    self.known[name] = Runtime()
                if isinstance(node, ast.For):
                    node.iter = self.visit(node.iter)
                else:
                    node.test = self.visit(node.test)
                node.body = self.block(node.body)
                return [node]
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                try:
                    self.known[name] = self.constant(value)
                except UnknownError:
                    return self.assign(ast.Name(name, ast.Store()), self.visit(value))
                return []
            case ast.Assign(targets=[target], value=value):
                return self.assign(target, self.visit(value))
            case ast.AugAssign(target=ast.Name(name)):
                self.known[name] = Runtime()
                return [ast.AugAssign(node.target, node.op, self.visit(node.value))]
            case ast.Expr(value):
                if isinstance(value, ast.Constant) or "static_assert" in ast.unparse(value):
                    return []
                found = self.visit(value)
                return [] if isinstance(found, ast.Constant) else [ast.Expr(found)]
            case ast.Return(ast.expr() as value):
                return [ast.Return(self.visit(value))]
        return [node]

    def branch(self, node: ast.If) -> list[ast.stmt]:
        """Take the branch that a constant decides on, else fold both."""
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self.block(node.body if test.value else node.orelse)
        before = dict(self.known)
        body = self.block(node.body)
        self.known = dict(before)
        others = self.block(node.orelse)
        self.known = before | dict.fromkeys(_assigned(node), Runtime())
        return [ast.If(test, body or [ast.Pass()], others)] if body or others else []

    def assign(self, target: ast.expr, value: ast.expr) -> list[ast.stmt]:
        """Assign, one by one where several are given."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            names = {each.id for each in target.elts if isinstance(each, ast.Name)}
            pairs = list(zip(target.elts, value.elts, strict=True))
            others = [_names(other) - {getattr(each, "id", "")} for each, other in pairs]
            if not names & set().union(*others):
                return [line for each, other in pairs for line in self.assign(each, other)]
        if isinstance(target, ast.Name):
            if isinstance(value, ast.Constant):
                self.known[target.id] = value.value
                return [ast.Assign([target], value, lineno=0)]  # for a loop that changes it; else nothing reads it
            if isinstance(value, ast.Name) and value.id == target.id:
                return []
        for name in _names(target):
            self.known[name] = Runtime()
        return [ast.Assign([target], value, lineno=0)]


class _PutIn(ast.NodeTransformer):
    """Puts arguments in the place of parameters."""

    def __init__(self, nodes: Mapping[str, ast.expr]) -> None:
        self.nodes = nodes

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return deepcopy(self.nodes.get(node.id, node))


def _can_put_in(value: ast.expr, nodes: Mapping[str, ast.expr]) -> bool:
    """Return whether nothing is computed twice, or written at length, if a function's value takes the call's place."""
    uses = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
    simple = ast.Name | ast.Attribute | ast.Constant
    return all(isinstance(node, simple) or uses.count(name) <= 1 for name, node in nodes.items())


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _assigned(node: ast.AST) -> set[str]:
    return set(_all_assigned(node))


def _tidy(body: list[ast.stmt], parameters: Iterable[str]) -> list[ast.stmt]:
    """Drop assignments that nothing reads, and second names, until there are none."""
    before = ""
    while before != (before := "".join(map(ast.dump, body))):
        body = _without_second_names(body, parameters)
        loads = {name for line in body for name in _all_read(line)}
        body = _without_unread(body, loads)
        match body:
            case [*others, ast.Assign([ast.Name(name)], value), ast.Return(ast.Name(returned))] if name == returned:
                body = [*others, ast.Return(value)]
    return body


def _all_read(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Store)]


def _without_unread(body: list[ast.stmt], loads: set[str]) -> list[ast.stmt]:
    """Drop assignments to names that nothing reads, or that the next statement with the name assigns anew."""
    left = []
    for i, line in enumerate(body):
        for inner in ("body", "orelse"):
            if getattr(line, inner, None):
                setattr(line, inner, _without_unread(getattr(line, inner), loads))
        if isinstance(line, ast.Assign) and not any(getattr(x, "attr", "") in EFFECTS for x in ast.walk(line.value)):
            names = _names(line.targets[0])
            later = next((after for after in body[i + 1 :] if names & _names(after)), None)
            is_overwritten = (
                isinstance(later, ast.Assign) and names <= _names(later.targets[0]) and not names & _names(later.value)
            )
            if not names & loads or is_overwritten:
                continue
        left.append(line)
    return left


def _without_second_names(body: list[ast.stmt], parameters: Iterable[str]) -> list[ast.stmt]:
    """Put `b` in for `a` after `a = b`, where neither changes."""
    assigned = [*parameters, *(name for line in body for name in _all_assigned(line))]
    for line in body:
        match line:
            case ast.Assign([ast.Name(name)], ast.Name() | ast.Attribute() as value) if assigned.count(name) == 1:
                if all(assigned.count(other) <= 1 for other in _names(value)):
                    put_in = _PutIn({name: value})
                    return [put_in.visit(each) for each in body if each is not line]
    return body


def _all_assigned(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def fold(function: Any, known: Mapping[str, Any], kernel: Kernel) -> Folded:
    """Fold a function for what is known of its arguments; what it calls goes into the kernel before it."""
    source = textwrap.dedent(inspect.getsource(function.fn))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)
    says = (ast.get_docstring(tree) or "").partition("\n")[0]
    body = _tidy(Folder(function, dict(known), kernel).block(tree.body), known)
    read = {name for line in body for name in _names(line)}
    folder = Folder(function, dict(known), kernel)
    for each in (each for line in body for each in ast.walk(line) if isinstance(each, ast.Attribute | ast.Subscript)):
        try:
            found = folder.value(each)
        except UnknownError:
            continue
        if isinstance(found, Runtime) and found.path:
            kernel.read[found.path] = None
    where = f"{function.fn.__module__.replace('.', '/')}.py:{function.fn.__code__.co_firstlineno}"
    folded = Folded(function.fn.__name__, says, where, [name for name in known if name in read], body)
    alike = [each for each in kernel.functions if each.name.rstrip("_0123456789") == folded.name.rstrip("_0123456789")]
    for other in alike:
        if [*map(ast.dump, other.body)] == [*map(ast.dump, body)]:
            return other
    if alike:
        folded.name += f"_{len(alike) + 1}"
    return folded


def fold_kernel(function: Any, arguments: Mapping[str, Any], changing: frozenset[str] = frozenset()) -> Kernel:
    """Fold a kernel for the arguments of a call, and what it calls, in the order of the calls.

    Args:
        function: the kernel.
        arguments: by name; fields that are `tl.constexpr`, None or 1 are constants.
        changing: names of numbers that are no constants, even if they are 1.
    """
    known = {name: lift(arguments[name], name, changing) for name in arguments}
    kernel = Kernel(num_fields=sum(map(count, known.values())))
    ordered = [fold(function, known, kernel)]
    by_name = {each.name: each for each in kernel.functions}
    for each in ordered:  # grows on the way
        names = [node.id for line in each.body for node in ast.walk(line) if isinstance(node, ast.Name)]
        ordered += [by_name.pop(name) for name in dict.fromkeys(names) if name in by_name]
    kernel.functions = ordered
    return kernel
