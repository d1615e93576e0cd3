"""Python to JavaScript, from the syntax tree: no formula of docs/explorer.html is written twice.

    program = Program()
    program.add(schedules.bubble_formula)      with all functions, classes and constants it uses
    program.source()

    def share(x, n):             function demo_share(x, n) {
        return -(-x // n)  -->     return (-py.floordiv((-x), n));
                                 }

    python -m page.translate     recompute.layer_bytes in JavaScript

`inspect` finds the source of a function, `ast` parses it. Then each kind of node has one function
here that writes it. Where the languages differ, it writes a call of page/python.js: // rounds down,
+ joins lists, an index may be negative, an empty list is false, keys may be tuples. A keyword
argument goes to the place that the called function's signature gives it. A name is what it is in
Python: local, global in its module, or a builtin.

What is not translated (`with`, `try`, `yield`, format specifications ..) raises TranslationError,
which names the function, the line and the code.

Not covered: integers beyond 2^53, which are rounded; True as a number; 1.0 as text, which is 1, and
a list of strings as text; < of tuples; += of a tuple, which is a list here; attributes that are
missing.
"""

import ast
import dataclasses
import inspect
import json
import math
import textwrap
from collections.abc import Hashable
from types import FunctionType, ModuleType


class TranslationError(Exception):
    """Names the function, the line in its file, and the code."""


# builtins, and what stands for them in page/python.js
BUILTINS = {
    **{f: f"py.{f.__name__}" for f in (abs, all, any, enumerate, int, len, list, max, min, next)},
    **{f: f"py.{f.__name__}" for f in (range, sorted, str, sum, zip, getattr, math.gcd)},
    tuple: "py.list",
    ValueError: "py.ValueError",
}
# methods of Python's types
METHODS = {
    "append": "{0}.push({1})",
    "items": "{0}.items()",
    "values": "{0}.values()",
    "get": "{0}.get({1})",
    "format": "py.format({0}, {1})",
    "replace": "py.replace({0}, {1})",
    "index": "py.index({0}, {1})",
    "join": "[...{1}].join({0})",
}
# names that Python allows and JavaScript does not, or that are used here
RESERVED = frozenset(
    "arguments case catch const debugger default delete do enum eval export extends function"
    " implements instanceof interface let new null package private protected public py static super"
    " switch this throw typeof undefined var void Dict".split()
)
OPERATORS = {
    ast.Add: "py.add({}, {})",
    ast.Sub: "({} - {})",
    ast.Mult: "py.mul({}, {})",
    ast.Div: "py.div({}, {})",
    ast.FloorDiv: "py.floordiv({}, {})",
    ast.Mod: "py.mod({}, {})",
    ast.Pow: "({} ** {})",
}
COMPARISONS = {
    ast.Eq: "py.equal({}, {})",
    ast.NotEq: "!py.equal({}, {})",
    ast.Lt: "{} < {}",
    ast.LtE: "{} <= {}",
    ast.Gt: "{} > {}",
    ast.GtE: "{} >= {}",
    ast.Is: "{} === {}",
    ast.IsNot: "{} !== {}",
    ast.In: "py.in({}, {})",
    ast.NotIn: "!py.in({}, {})",
}


def identifier(name: str) -> str:
    return name + "_" if name in RESERVED else name


# --- a program ------------------------------------------------------------------------------------


class Program:
    """Functions, classes and constants in JavaScript, each after the classes and constants that it
    uses. tensor_parallel.check becomes tensor_parallel_check."""

    def __init__(self):
        # id of a Python object -> (its JavaScript name, the object, kept so that the id stays its)
        self.names: dict[int, tuple[str, object]] = {}
        self.parts: list[str] = []
        # methods of the classes in here
        self.methods: set[str] = set()

    def source(self) -> str:
        return "\n\n".join(self.parts) + "\n"

    def add(self, thing, members: tuple[str, ...] = ()) -> str:
        """Translate a function or a class, once. Returns its name in JavaScript.

        members: the methods and properties of a class whose `__post_init__` stays in Python; it is
        then made from an object with all fields. By default all members.
        """
        if id(thing) in self.names:
            return self.names[id(thing)][0]
        name = f"{thing.__module__.split('.')[-1]}_{thing.__name__}"
        self.names[id(thing)] = (name, thing)
        if isinstance(thing, type):
            source = class_source(self, thing, name, members)
        else:
            source = "function " + Function(self, thing).source(name)
        self.parts.append(f"// {thing.__module__}.{thing.__name__}\n{source}")
        return name

    def constant(self, module: str, name: str, value) -> str:
        """The JavaScript name of a module's constant. Numbers and None are written as they are."""
        if isinstance(value, int | float | None):
            return self.literal(value)
        if id(value) not in self.names:
            self.names[id(value)] = (f"{module.split('.')[-1]}_{name}", value)
            self.parts.append(f"const {self.names[id(value)][0]} = {self.literal(value)};")
        return self.names[id(value)][0]

    def literal(self, value) -> str:
        """A value of Python as an expression of JavaScript."""
        if isinstance(value, float) and math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        if isinstance(value, str | int | float | None):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            pairs = [f"[{self.literal(k)}, {self.literal(v)}]" for k, v in value.items()]
            return f"new Dict([{', '.join(pairs)}])"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            values = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return f"new {self.add(type(value))}({', '.join(map(self.literal, values))})"
        if type(value) in (list, tuple):
            return f"[{', '.join(map(self.literal, value))}]"
        return self.reference(value)

    def reference(self, thing) -> str:
        """The JavaScript name of a function or a class. Raises TranslationError where it has no
        source in Python."""
        if isinstance(thing, Hashable) and thing in BUILTINS:
            return BUILTINS[thing]
        try:
            inspect.getsource(thing)
        except (OSError, TypeError):
            raise TranslationError(f"{thing!r} is not translated") from None
        return self.add(thing)


def class_source(program: Program, cls: type, name: str, members: tuple[str, ...]) -> str:
    """A NamedTuple becomes an Array with named elements; a dataclass and an exception a class."""
    found = {}
    for member, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else value
        # not what a dataclass has generated
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        written = file == inspect.getsourcefile(cls)
        wanted = member in members if members else member in ("__init__", "__str__")
        if written and (wanted or not (members or member.startswith("_"))):
            found[member] = value
    program.methods |= set(found)
    base = cls.__bases__[0]
    extends = "" if base is object else f" extends {base_name(program, base, members)}"
    lines = [f"class {name}{extends} {{", *constructor(program, cls, members)]
    for member, value in found.items():
        if isinstance(value, property):
            lines.append(Function(program, value.fget).source(f"get {member}"))
        elif member == "__init__":
            lines.append(Function(program, value).source("constructor"))
        else:
            lines.append(Function(program, value).source(member))
    return "\n".join([lines[0], *(textwrap.indent(x, "  ") for x in lines[1:]), "}"])


def base_name(program: Program, base: type, members: tuple[str, ...]) -> str:
    if base is tuple:
        return "Array"
    return BUILTINS.get(base) or program.add(base, members)


def constructor(program: Program, cls: type, members: tuple[str, ...]) -> list[str]:
    """Of a NamedTuple or a dataclass."""
    if issubclass(cls, tuple):
        fields = ", ".join(cls._fields)
        getters = [f"get {field}() {{ return this[{i}]; }}" for i, field in enumerate(cls._fields)]
        return [
            f"static fields = {json.dumps(cls._fields)};",
            # map and slice of it give an Array
            "static get [Symbol.species]() { return Array; }",
            f"constructor({fields}) {{ super(); this.push({fields}); }}",
            *getters,
        ]
    if not dataclasses.is_dataclass(cls):
        return []
    if members:
        derived = cls.__bases__ != (object,)
        return [] if derived else ["constructor(fields) { Object.assign(this, fields); }"]
    fields = dataclasses.fields(cls)
    defaults = [f"{f.name} = {program.literal(f.default)}" for f in fields]
    names = ", ".join(f.name for f in fields)
    return [f"constructor({', '.join(defaults)}) {{ Object.assign(this, {{ {names} }}); }}"]


# --- a function -----------------------------------------------------------------------------------


class Function:
    """One function, translated. Statements and expressions of Python are nodes of `ast`."""

    def __init__(self, program: Program, function: FunctionType):
        self.program = program
        self.function = function
        lines, self.first_line = inspect.getsourcelines(function)
        self.tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        arguments = self.tree.args
        self.arguments = [a.arg for a in arguments.args]
        if arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg:
            self.refuse(arguments)
        for decorator in self.tree.decorator_list:
            if ast.unparse(decorator) != "property":
                self.refuse(decorator)
        if arguments.kwarg:
            self.arguments.append(arguments.kwarg.arg)
        self.local = set(self.arguments)
        self.assigned = set()
        for node in ast.walk(ast.Module(self.tree.body, [])):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.local.add(node.id)

    def refuse(self, node: ast.AST):
        line = self.first_line + getattr(node, "lineno", 1) - 1
        where = f"{self.function.__module__}.{self.function.__qualname__}, line {line}"
        code = ast.unparse(node).split("\n")[0]
        raise TranslationError(f"{where}: {type(node).__name__}, {code!r}, is not translated")

    def source(self, name: str) -> str:
        """name(arguments) { body }"""
        is_method = self.arguments[:1] == ["self"]
        parameters = inspect.signature(self.function).parameters
        heads = []
        for argument in self.arguments[is_method:]:
            head = identifier(argument)
            default = parameters[argument].default
            if default is not inspect.Parameter.empty:
                head += f" = {self.program.literal(default)}"
            elif parameters[argument].kind is inspect.Parameter.VAR_KEYWORD:
                head += " = new Dict([])"
            heads.append(head)
        body = [s for s in self.tree.body if not is_docstring(s)]
        lines = []
        if is_method and is_super_init(body[0]):
            lines.append(f"super({self.list_of(body.pop(0).value.args)});")
        if is_method:
            lines.append("const self = this;")
        lines += self.block(body)
        # the end of a function gives None
        if name != "constructor" and not isinstance(body[-1], ast.Return | ast.Raise):
            lines.append("return null;")
        declared = sorted(identifier(name) for name in self.assigned - set(self.arguments))
        if declared:
            lines.insert(0, f"let {', '.join(declared)};")
        return f"{name}({', '.join(heads)}) {{\n{indented(lines)}\n}}"

    def block(self, statements: list[ast.stmt]) -> list[str]:
        return [line for statement in statements for line in self.statement(statement)]

    def statement(self, node: ast.stmt) -> list[str]:
        if type(node) not in STATEMENTS or (is_loop(node) and node.orelse):
            self.refuse(node)
        return STATEMENTS[type(node)](self, node)

    def expression(self, node: ast.expr) -> str:
        if type(node) not in EXPRESSIONS:
            self.refuse(node)
        return EXPRESSIONS[type(node)](self, node)

    def list_of(self, nodes: list[ast.expr]) -> str:
        return ", ".join(map(self.expression, nodes))

    def condition(self, node: ast.expr) -> str:
        """An expression of which only the truth counts."""
        text = self.expression(node)
        return text if is_boolean(node) else f"py.truth({text})"

    def global_value(self, node: ast.expr):
        """(module, name, value) of a global, also of `module.name`; None for anything else."""
        if isinstance(node, ast.Name) and node.id not in self.local:
            variables = self.function.__globals__
            builtins = vars(__import__("builtins"))
            if node.id in variables or node.id in builtins:
                value = variables.get(node.id, builtins.get(node.id))
                return self.function.__module__, node.id, value
        if isinstance(node, ast.Attribute):
            owner = self.global_value(node.value)
            if owner and isinstance(owner[2], ModuleType):
                return owner[2].__name__, node.attr, getattr(owner[2], node.attr)
        return None

    def assign(self, target: ast.expr, value: str) -> list[str]:
        """target = value"""
        if isinstance(target, ast.Name):
            self.assigned.add(target.id)
            return [f"{identifier(target.id)} = {value};"]
        if isinstance(target, ast.Attribute):
            return [f"{self.expression(target)} = {value};"]
        if isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Slice):
            owner = self.expression(target.value)
            return [f"py.put({owner}, {self.expression(target.slice)}, {value});"]
        if not isinstance(target, ast.Tuple):
            self.refuse(target)
        for name in target.elts:
            if not isinstance(name, ast.Name):
                self.refuse(target)
            self.assigned.add(name.id)
        names = ", ".join(identifier(name.id) for name in target.elts)
        return [f"[{names}] = py.unpack({value}, {len(target.elts)});"]


def indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "  ")


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_super_init(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("super().__init__(")


def is_loop(node: ast.stmt) -> bool:
    return isinstance(node, ast.For | ast.While)


def is_boolean(node: ast.expr) -> bool:
    """Whether Python and JavaScript agree on the truth of an expression."""
    if isinstance(node, ast.BoolOp):
        return all(map(is_boolean, node.values))
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or isinstance(node, ast.Compare)


# --- statements: each returns lines ---------------------------------------------------------------


def _assign(f: Function, node: ast.Assign) -> list[str]:
    if len(node.targets) > 1:
        f.refuse(node)
    return f.assign(node.targets[0], f.expression(node.value))


def _annotated(f: Function, node: ast.AnnAssign) -> list[str]:
    return f.assign(node.target, f.expression(node.value)) if node.value else []


def _augmented(f: Function, node: ast.AugAssign) -> list[str]:
    old = f.expression(node.target)
    operator = "py.grow({}, {})" if isinstance(node.op, ast.Add) else OPERATORS.get(type(node.op))
    if operator is None:
        f.refuse(node)
    return f.assign(node.target, operator.format(old, f.expression(node.value)))


def _if(f: Function, node: ast.If) -> list[str]:
    lines = [f"if ({f.condition(node.test)}) {{", indented(f.block(node.body))]
    if node.orelse:
        lines += ["} else {", indented(f.block(node.orelse))]
    return [*lines, "}"]


def _for(f: Function, node: ast.For) -> list[str]:
    # Python has no names with $
    body = f.assign(node.target, "$item") + f.block(node.body)
    return [f"for (const $item of {f.expression(node.iter)}) {{", indented(body), "}"]


def _while(f: Function, node: ast.While) -> list[str]:
    return [f"while ({f.condition(node.test)}) {{", indented(f.block(node.body)), "}"]


def _return(f: Function, node: ast.Return) -> list[str]:
    return [f"return {f.expression(node.value) if node.value else 'null'};"]


def _raise(f: Function, node: ast.Raise) -> list[str]:
    if node.exc is None or node.cause:
        f.refuse(node)
    return [f"throw {f.expression(node.exc)};"]


STATEMENTS = {
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: _for,
    ast.While: _while,
    ast.Return: _return,
    ast.Raise: _raise,
    ast.Expr: lambda f, node: [f"{f.expression(node.value)};"],
    ast.Pass: lambda f, node: [],
    ast.Break: lambda f, node: ["break;"],
    ast.Continue: lambda f, node: ["continue;"],
}

# --- expressions: each returns text ---------------------------------------------------------------


def _constant(f: Function, node: ast.Constant) -> str:
    if not isinstance(node.value, str | int | float | None):
        f.refuse(node)
    return f.program.literal(node.value)


def _name(f: Function, node: ast.Name | ast.Attribute) -> str:
    found = f.global_value(node)
    if found:
        value = found[2]
        if isinstance(value, ModuleType):
            f.refuse(node)
        return f.program.reference(value) if callable(value) else f.program.constant(*found)
    if isinstance(node, ast.Attribute):
        return f"{f.expression(node.value)}.{node.attr}"
    if node.id not in f.local:
        f.refuse(node)
    return identifier(node.id)


def _unary(f: Function, node: ast.UnaryOp) -> str:
    if isinstance(node.op, ast.Not):
        return f"!({f.condition(node.operand)})"
    if not isinstance(node.op, ast.USub):
        f.refuse(node)
    return f"(-{f.expression(node.operand)})"


def _binary(f: Function, node: ast.BinOp) -> str:
    text = isinstance(node.left, ast.Constant | ast.JoinedStr) and not is_number(node.left)
    if type(node.op) not in OPERATORS or (text and isinstance(node.op, ast.Mod)):
        f.refuse(node)
    return OPERATORS[type(node.op)].format(f.expression(node.left), f.expression(node.right))


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _boolean(f: Function, node: ast.BoolOp) -> str:
    is_and = isinstance(node.op, ast.And)
    if is_boolean(node):
        return f"({(' && ' if is_and else ' || ').join(map(f.expression, node.values))})"
    *first, text = map(f.expression, node.values)
    for value in reversed(first):
        text = f"py.{'and' if is_and else 'or'}({value}, () => {text})"
    return text


def _compare(f: Function, node: ast.Compare) -> str:
    # what stands in the middle of a <= b <= c is written twice: it has no side effects
    terms = [f.expression(term) for term in (node.left, *node.comparators)]
    links = zip(node.ops, terms, terms[1:])
    return f"({' && '.join(COMPARISONS[type(op)].format(x, y) for op, x, y in links)})"


def _conditional(f: Function, node: ast.IfExp) -> str:
    values = f"{f.expression(node.body)} : {f.expression(node.orelse)}"
    return f"({f.condition(node.test)} ? {values})"


def _list(f: Function, node: ast.List | ast.Tuple) -> str:
    return f"[{f.list_of(node.elts)}]"


def _dict(f: Function, node: ast.Dict) -> str:
    if None in node.keys:
        f.refuse(node)
    pairs = [f"[{f.expression(k)}, {f.expression(v)}]" for k, v in zip(node.keys, node.values)]
    return f"new Dict([{', '.join(pairs)}])"


def _subscript(f: Function, node: ast.Subscript) -> str:
    owner = f.expression(node.value)
    if not isinstance(node.slice, ast.Slice):
        return f"py.at({owner}, {f.expression(node.slice)})"
    bounds = [node.slice.lower, node.slice.upper, node.slice.step]
    if bounds[2] is None:
        bounds.pop()
    return f"py.slice({owner}, {', '.join(f.expression(x) if x else 'undefined' for x in bounds)})"


def _text(f: Function, node: ast.JoinedStr) -> str:
    parts = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts.append(f.expression(value))
        elif value.format_spec or value.conversion != -1:
            f.refuse(node)
        else:
            parts.append(f"py.str({f.expression(value.value)})")
    return f"({' + '.join(parts)})" if parts else '""'


def _comprehension(f: Function, node: ast.ListComp | ast.GeneratorExp | ast.DictComp) -> str:
    """A JavaScript generator with the same loops."""
    loops = ""
    for generator in node.generators:
        target = generator.target
        if not isinstance(target, ast.Name | ast.Tuple):
            f.refuse(node)
        names = f.expression(target)
        loops += f"for (const {names} of {f.expression(generator.iter)}) "
        loops += "".join(f"if ({f.condition(test)}) " for test in generator.ifs)
    if isinstance(node, ast.DictComp):
        item = f"[{f.expression(node.key)}, {f.expression(node.value)}]"
        return f"new Dict((function* () {{ {loops}yield {item}; }})())"
    text = f"(function* () {{ {loops}yield {f.expression(node.elt)}; }})()"
    return f"py.list({text})" if isinstance(node, ast.ListComp) else text


def _lambda(f: Function, node: ast.Lambda) -> str:
    if node.args.defaults or node.args.vararg or node.args.kwonlyargs:
        f.refuse(node)
    names = [a.arg for a in node.args.args]
    new = set(names) - f.local
    f.local |= new
    text = f"(({', '.join(map(identifier, names))}) => {f.expression(node.body)})"
    f.local -= new
    return text


def _call(f: Function, node: ast.Call) -> str:
    if ast.unparse(node.func).startswith("super()."):
        return f"super.{node.func.attr}({f.list_of(node.args)})"
    found = f.global_value(node.func)
    if isinstance(node.func, ast.Attribute) and not found:
        return _method(f, node)
    if found and found[2] is isinstance:
        if ast.unparse(node.args[1]) != "list":
            f.refuse(node)
        return f"Array.isArray({f.expression(node.args[0])})"
    if found and ast.unparse(node.func) == "defaultdict":
        return f"new Dict([], () => {zero_of(f, node)})"
    callee = f.expression(node.func)
    new = "new " if found and is_class(found[2]) else ""
    return f"{new}{callee}({', '.join(_arguments(f, node, found and found[2]))})"


def is_class(thing) -> bool:
    """range and int are functions in JavaScript."""
    if not isinstance(thing, type):
        return False
    return thing not in BUILTINS or issubclass(thing, Exception)


def zero_of(f: Function, node: ast.Call) -> str:
    if [ast.unparse(a) for a in node.args] not in (["float"], ["int"]):
        f.refuse(node)
    return "0"


def _method(f: Function, node: ast.Call) -> str:
    owner = f.expression(node.func.value)
    name = node.func.attr
    if name == "_replace" and not node.args:
        changes = ", ".join(f"{k.arg}: {f.expression(k.value)}" for k in node.keywords)
        return f"py.replaced({owner}, {{ {changes} }})"
    if name == "format" and not node.args and len(node.keywords) == 1:
        return METHODS[name].format(owner, f.expression(node.keywords[0].value))
    if node.keywords:
        f.refuse(node)
    arguments = f.list_of(node.args)
    if name in METHODS:
        return METHODS[name].format(owner, arguments)
    if name not in f.program.methods:
        f.refuse(node)
    return f"{owner}.{name}({arguments})"


def _arguments(f: Function, node: ast.Call, callee) -> list[str]:
    """Of a call, in the order of the called function's signature."""
    places = [f.expression(a) for a in node.args]
    if not node.keywords:
        return places
    if callee is sorted and [k.arg for k in node.keywords] == ["key"]:
        return [*places, f.expression(node.keywords[0].value)]
    if not isinstance(callee, type | FunctionType) or callee in BUILTINS:
        f.refuse(node)
    names = list(inspect.signature(callee).parameters.values())
    extra = names.pop() if names and names[-1].kind is inspect.Parameter.VAR_KEYWORD else None
    order = [parameter.name for parameter in names]
    rest = []
    for keyword in node.keywords:
        value = f.expression(keyword.value)
        if keyword.arg in order and order.index(keyword.arg) >= len(node.args):
            place = order.index(keyword.arg)
            places += ["undefined"] * (place + 1 - len(places))
            places[place] = value
        elif extra is None or any(isinstance(a, ast.Starred) for a in node.args):
            f.refuse(node)
        else:
            rest.append(value if keyword.arg is None else f'new Dict([["{keyword.arg}", {value}]])')
    if rest:
        places += ["undefined"] * (len(order) - len(places))
        places.append(f"py.merge({', '.join(rest)})")
    return places


EXPRESSIONS = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _name,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.BoolOp: _boolean,
    ast.Compare: _compare,
    ast.IfExp: _conditional,
    ast.List: _list,
    ast.Tuple: _list,
    ast.Dict: _dict,
    ast.Subscript: _subscript,
    ast.JoinedStr: _text,
    ast.ListComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _comprehension,
    ast.Lambda: _lambda,
    ast.Starred: lambda f, node: f"...{f.expression(node.value)}",
    ast.Call: _call,
}


def main():
    import recompute

    program = Program()
    program.add(recompute.layer_bytes)
    print(program.source(), end="")


if __name__ == "__main__":
    main()
