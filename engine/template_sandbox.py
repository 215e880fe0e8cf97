"""The Jinja environment of chat templates: what a template may reach, and how much it may do.

A model's template is code somebody else wrote. What it may name is a list (engine.template_guards),
and what it names beyond that is refused when it is loaded. What it may do is a budget
(engine.template_budget): every operation that can make something new is led through it.
"""

import types
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from engine.template_budget import Budget, check_size
from engine.template_guards import (
    FILTERS,
    REFUSED_METHODS,
    check_format,
    check_power,
    check_product,
    check_sum,
    guarded_filters,
    guarded_tests,
    method_guard,
    strftime_now,
)

MAX_TEMPLATE_CHARS = 128 << 10  # the longest of published models have some 30,000
MAX_NESTED = 200  # nodes in nodes
_GLOBALS = ("cycler", "dict", "joiner", "namespace", "range")
_HIDDEN_ARGUMENTS = ("_loop_vars", "_block_vars")  # Jinja's own, for functions with a context
_NAMING_FILTERS = ("map",)  # their first argument may be another filter's name


class _Namespace(Namespace):
    def __repr__(self) -> str:  # its own would print all that it holds
        return "<namespace>"


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed before there is a budget for it
            extensions=[_GenerationTag, LoopControlExtension],
            finalize=_printed,
        )
        self.budget = Budget()
        self.filters: dict[str, Any] = guarded_filters(self.budget)
        self.tests: dict[str, Any] = guarded_tests(self.budget)
        for name in set(self.globals) - {*_GLOBALS}:
            del self.globals[name]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = strftime_now
        self._functions = frozenset(self.globals.values())
        # what the transformed template calls
        self.tick = self.budget.tick
        self.made = self.budget.made

    def ticked(self, value: Any) -> Any:
        self.budget.tick()
        return value

    def joined(self, *values: Any) -> Any:
        """Of `~`."""
        texts = [value if isinstance(value, str) else str(value) for value in values]
        check_size("a joined text", sum(map(len, texts)))
        return self.budget.made("".join(texts))

    def concat(self, parts: Any) -> str:  # of a macro or a set block
        parts = list(parts)
        check_size("a printed text", sum(map(len, parts)))
        text: str = self.budget.made("".join(parts))
        return text

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _check_names(template)
        _Budgeted().visit(template)  # changes it in place
        template.set_environment(self)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            check_product(left, right)
        elif operator == "+":
            check_sum(self.budget, left, right)
        elif operator == "**":
            check_power(left, right)
        elif isinstance(left, str):
            check_format(self.budget, left, [right])
        return self.budget.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):  # hashing it could take as long as it is large
            raise SecurityError("a tuple as a key")
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __called: Any, *args: Any, **kwargs: Any) -> Any:
        """Only what the environment itself gives to templates, and methods that are allowed."""
        __self.budget.tick()
        # the sandbox wraps str.format
        method = getattr(__called, "__wrapped__", __called)
        receiver = getattr(method, "__self__", None)
        if isinstance(receiver, str | list | tuple | dict):
            try:
                guard = method_guard(receiver, method.__name__)
            except LookupError:
                what = f"{type(receiver).__name__}.{method.__name__}"
                raise SecurityError(f"a call of {what}") from None
            if method.__name__ == "join":
                args = tuple(map(__self.budget.items, args))
            if guard is not None:
                given = {name: kwargs[name] for name in kwargs if name not in _HIDDEN_ARGUMENTS}
                guard(__self.budget, receiver, *args, **given)
            result = super().call(__context, __called, *args, **kwargs)
            return result if method.__name__ == "get" else __self.budget.made(result)
        if not __self._is_own(__called, receiver):
            name = getattr(method, "__name__", type(__called).__name__)
            raise SecurityError(f"a call of {name}")
        result = super().call(__context, __called, *args, **kwargs)
        return __self.budget.made(result) if __called is dict else result

    def _is_own(self, called: Any, receiver: Any) -> bool:
        if isinstance(receiver, LoopContext | Cycler):
            return called.__name__ in ("cycle", "changed", "next", "reset")
        if isinstance(called, types.MethodType):
            return receiver in (self, self.budget)
        return called in self._functions or isinstance(
            called, Macro | LoopContext | BlockReference | Joiner | Undefined
        )

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja's own answer is an undefined value, which prints as nothing: an attack gone unseen
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__}")


@pass_context
def _printed(context: Context, value: Any) -> Any:
    """What `{{ value }}` prints. (With a context, so that nothing is printed at compilation.)"""
    if isinstance(value, str):
        return value
    sandbox = context.environment
    assert isinstance(sandbox, _Sandbox)
    return sandbox.made(str(value))


class _Budgeted(NodeTransformer):
    """Leads a template's expressions and loops through the sandbox's budget."""

    def __init__(self) -> None:
        self._height = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._height += 1
        if self._height > MAX_NESTED:
            raise TemplateSyntaxError(f"nested more than {MAX_NESTED} deep", node.lineno)
        try:
            return super().visit(node, *args, **kwargs)
        finally:
            self._height -= 1

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick")).set_lineno(node.lineno))
        kept: nodes.Node = node
        return kept

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _with_tick

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _call("ticked", node.expr)
        return node

    def _new_value(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        children = node.iter_child_nodes()
        if getattr(node, "ctx", "load") != "load" or all(map(_is_constant, children)):
            return node  # type: ignore[no-any-return]
        return _call("made", node)

    visit_List = visit_Tuple = visit_Dict = _new_value

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", node) if isinstance(node.arg, nodes.Slice) else node


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    """Of one of the sandbox's own methods, which no variable of a template can hide."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Pair):
        return _is_constant(node.key) and _is_constant(node.value)
    return isinstance(node, nodes.Const | nodes.TemplateData)


def _check_names(template: nodes.Template) -> None:
    """Raise TemplateSyntaxError at what a template may not use."""
    _check_functions(template)
    refused_tags = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    for node in template.find_all((*refused_tags, nodes.EvalContextModifier)):
        _refuse(f"the tag {type(node).__name__.lower()!r}", node)


def _check_functions(template: nodes.Template) -> None:
    for filtered in template.find_all(nodes.Filter):
        names = [filtered.name]
        if filtered.name in _NAMING_FILTERS and filtered.args:
            names += [arg.value for arg in filtered.args[:1] if isinstance(arg, nodes.Const)]
        for name in names:
            if name not in FILTERS:
                _refuse(f"the filter {name!r}", filtered)
    for test in template.find_all(nodes.Test):
        if test.name not in SANDBOX.tests:
            _refuse(f"the test {test.name!r}", test)
    for call in template.find_all(nodes.Call):
        called = call.node
        if isinstance(called, nodes.Getattr) and called.attr in REFUSED_METHODS:
            _refuse(f"the method {called.attr!r}", call)
        if isinstance(called, nodes.Name) and called.name in _REFUSED_FUNCTIONS:
            _refuse(f"the function {called.name!r}", call)


def _refuse(what: str, node: nodes.Node) -> NoReturn:
    raise TemplateSyntaxError(f"{what} is not among those a chat template may use", node.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


_REFUSED_FUNCTIONS = DEFAULT_NAMESPACE.keys() - {*_GLOBALS}
SANDBOX = _Sandbox()
