"""`where` as text: a small part of SQL, made into an Arrow expression.

    amount > 10 AND country = 'DE'
    day BETWEEN '2026-11-01' AND '2026-11-17' AND NOT (item IN ('book', 'lamp') OR note IS NULL)
    customer.name LIKE 'A%'

    condition  = condition OR condition | condition AND condition | NOT condition | ( condition ) | column
               | operand (= == != <> < <= > >=) operand | operand [NOT] IN (literal, ...)
               | operand [NOT] BETWEEN operand AND operand | operand [NOT] LIKE 'pattern' | operand IS [NOT] NULL
    operand    = column | column.field | `any name` | literal
    literal    = 7 | -1.5 | 2e3 | 'text' | DATE '2026-11-17' | TIMESTAMP '2026-11-17 10:00:00Z' | TRUE | FALSE | NULL

Logic has three values as in SQL: a comparison with null is neither true nor false, and a row is taken only where the
whole is true. Nothing is executed or looked up but columns. A literal takes the type of the column that it stands
beside, and one that does not fit it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["parsed"]

TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<number>(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?)|(?P<text>'([^']|'')*'|\"([^\"]|\"\")*\")"
    r"|(?P<quoted>`([^`]|``)+`)|(?P<name>[^\W\d]\w*)|(?P<sign><=|>=|<>|!=|==|=|<|>|\(|\)|,|\.|-|\+)"
)
WORDS = ("AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "IS", "NULL", "TRUE", "FALSE")
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<>": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


class Token(NamedTuple):
    kind: str  # number, text, name (quoted or not), word, sign; empty at the end
    text: str
    at: int


class Literal(NamedTuple):
    kind: str  # number, text, word
    text: str
    at: int


class Column(NamedTuple):
    expression: Any
    kind: pa.DataType
    name: str


def parsed(text: str, schema: pa.Schema) -> Any:
    """The condition as an expression over columns of that schema. Raises ValueError, naming what is wrong and where."""
    return _Parser(text, schema).whole()


class _Parser:
    def __init__(self, text: str, schema: pa.Schema) -> None:
        self.text = text
        self.schema = schema
        self.tokens = self._tokens()
        self.next = 0

    # ---- words

    def _tokens(self) -> list[Token]:
        found: list[Token] = []
        at = 0
        while at < len(self.text):
            match = TOKEN.match(self.text, at)
            if match is None:
                raise self._wrong(at, f"{self.text[at]!r} is not understood")
            kind, word = str(match.lastgroup), match.group()
            if kind == "text":
                if "\\" in word:
                    raise self._wrong(at, "a backslash means other things elsewhere; give a pyarrow expression instead")
                word = word[1:-1].replace(word[0] * 2, word[0])
            elif kind == "quoted":
                kind, word = "name", word[1:-1].replace("``", "`")
            elif kind == "name" and word.upper() in WORDS:
                kind, word = "word", word.upper()
            if kind != "space":
                found.append(Token(kind, word, at))
            at = match.end()
        return [*found, Token("", "", len(self.text))]

    def _wrong(self, at: int, why: str) -> ValueError:
        return ValueError(f"where={self.text!r}: {why}, at character {at + 1}. Nothing was sent")

    def _is(self, *words: str) -> bool:
        """Whether these words and signs follow."""
        following = self.tokens[self.next : self.next + len(words)]
        return [token.text for token in following if token.kind in ("word", "sign")] == list(words)

    def _take(self, *words: str) -> bool:
        found = self._is(*words)
        self.next += len(words) if found else 0
        return found

    def _need(self, word: str) -> None:
        if not self._take(word):
            token = self.tokens[self.next]
            raise self._wrong(
                token.at, f"{word} is missing before {token.text!r}" if token.kind else f"{word} is missing"
            )

    # ---- conditions

    def whole(self) -> Any:
        found = self._any()
        token = self.tokens[self.next]
        if token.kind:
            raise self._wrong(token.at, f"{token.text!r} is not expected")
        return found

    def _any(self) -> Any:
        found = self._all()
        while self._take("OR"):
            found = found | self._all()
        return found

    def _all(self) -> Any:
        found = self._negated()
        while self._take("AND"):
            found = found & self._negated()
        return found

    def _negated(self) -> Any:
        return ~self._negated() if self._take("NOT") else self._condition()

    def _condition(self) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._take("("):
            found = self._any()
            self._need(")")
            return found
        at = self.tokens[self.next].at
        left = self._operand()
        for sign, compare in COMPARISONS.items():
            if self._take(sign):
                return self._compared(compare, left, self._operand(), at)
        if self._take("IS"):
            negated = self._take("NOT")
            self._need("NULL")
            given = self._column(left, at).expression
            return given.is_valid() if negated else given.is_null()
        negated = self._take("NOT")
        if self._take("IN"):
            # Not isin(): that says false for null, and its negation then true.
            found = reduce(
                lambda a, b: a | b, (self._compared(COMPARISONS["="], left, one, at) for one in self._list())
            )
        elif self._take("BETWEEN"):
            low = self._operand()
            self._need("AND")
            high = self._operand()
            found = self._compared(COMPARISONS[">="], left, low, at) & self._compared(COMPARISONS["<="], left, high, at)
        elif self._take("LIKE"):
            column, pattern = self._column(left, at), self._operand()
            if not isinstance(pattern, Literal) or pattern.kind != "text":
                raise self._wrong(at, "LIKE needs a pattern in quotes")
            call: Any = pc  # whose type hints do not know it
            found = call.match_like(column.expression, pattern.text)
        elif negated:
            raise self._wrong(self.tokens[self.next].at, "IN, BETWEEN or LIKE is missing after NOT")
        elif isinstance(left, Column) and pa.types.is_boolean(left.kind):
            return left.expression
        elif isinstance(left, Literal) and left.text in ("TRUE", "FALSE") and left.kind == "word":
            return pc.scalar(left.text == "TRUE")
        else:
            raise self._wrong(self.tokens[self.next].at, "a comparison is missing")
        return ~found if negated else found

    def _list(self) -> list[Literal]:
        self._need("(")
        found = []
        while True:
            at = self.tokens[self.next].at
            one = self._operand()
            if not isinstance(one, Literal):
                raise self._wrong(at, "IN needs literals")
            found.append(one)
            if not self._take(","):
                self._need(")")
                return found

    def _compared(
        self, compare: Callable[[Any, Any], Any], left: Column | Literal, right: Column | Literal, at: int
    ) -> Any:
        if isinstance(left, Literal):
            if isinstance(right, Literal):
                raise self._wrong(at, "one side of a comparison must be a column")
            return compare(self._value(left, right), right.expression)
        return compare(left.expression, right.expression if isinstance(right, Column) else self._value(right, left))

    # ---- operands

    def _operand(self) -> Column | Literal:
        token = self.tokens[self.next]
        self.next += 1
        if token.kind == "sign" and token.text in "+-" and self.tokens[self.next].kind == "number":
            number = self.tokens[self.next]
            self.next += 1
            return Literal("number", token.text.strip("+") + number.text, token.at)
        if token.kind in ("number", "text"):
            return Literal(token.kind, token.text, token.at)
        if token.kind == "word" and token.text in ("TRUE", "FALSE", "NULL"):
            return Literal("word", token.text, token.at)
        if token.kind == "name":
            if token.text.upper() in ("DATE", "TIMESTAMP") and self.tokens[self.next].kind == "text":
                text = self.tokens[self.next]
                self.next += 1
                return Literal("text", text.text, token.at)
            path = [token.text]
            while self._take("."):
                if self.tokens[self.next].kind != "name":
                    raise self._wrong(self.tokens[self.next].at, "a name is missing after the dot")
                path.append(self.tokens[self.next].text)
                self.next += 1
            return self._field(path, token.at)
        raise self._wrong(token.at, f"{token.text!r} is not expected" if token.kind else "it ends too early")

    def _field(self, path: list[str], at: int) -> Column:
        """A column, or a field of a struct; case counts only where names differ by nothing else."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if len(path) > 1 and ".".join(path) in self.schema.names:
            path = [".".join(path)]
        fields: list[pa.Field] = list(self.schema)
        found: list[pa.Field] = []
        for name in path:
            fits = [one for one in fields if one.name == name]
            fits = fits or [one for one in fields if one.name.lower() == name.lower()]
            if len(fits) != 1:
                names = ", ".join(one.name for one in fields) or "none"
                raise self._wrong(at, f"there is no column {'.'.join(path)!r}; there are {names}")
            found.append(fits[0])
            fields = list(fits[0].type) if pa.types.is_struct(fits[0].type) else []
        kind = found[-1].type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        steps = tuple(one.name for one in found)
        return Column(pc.field(steps if len(steps) > 1 else steps[0]), kind, ".".join(steps))

    def _column(self, operand: Column | Literal, at: int) -> Column:
        if isinstance(operand, Literal):
            raise self._wrong(at, "a column is missing")
        return operand

    def _value(self, literal: Literal, beside: Column) -> Any:
        """A literal as a scalar that can be compared with the column."""
        import pyarrow as pa
        import pyarrow.compute as pc

        kind, known = beside.kind, pa.types
        text = literal.text
        scalar = None
        try:
            if literal.kind == "word":
                if text == "NULL":
                    scalar = pa.scalar(None, kind)
                elif known.is_boolean(kind):
                    scalar = pa.scalar(text == "TRUE")
            elif literal.kind == "number":
                if known.is_decimal(kind):
                    scalar = pa.scalar(Decimal(text))
                elif known.is_integer(kind) and re.fullmatch(r"-?\d+", text):
                    scalar = pa.scalar(int(text))
                elif known.is_integer(kind) or known.is_floating(kind):
                    scalar = pa.scalar(float(text))
            elif known.is_date(kind):
                scalar = pa.scalar(date.fromisoformat(text), kind)
            elif known.is_timestamp(kind):
                when = datetime.fromisoformat(text)
                if (when.tzinfo is None) is not (kind.tz is None):
                    zone = "an offset, as in '2026-11-17 10:00:00Z'" if kind.tz else "no offset"
                    raise self._wrong(literal.at, f"column {beside.name!r} is {kind}, so {text!r} needs {zone}")
                scalar = pa.scalar(when, pa.timestamp("us", kind.tz))
            elif any(fits(kind) for fits in (known.is_string, known.is_large_string, known.is_string_view)):
                scalar = pa.scalar(text, kind)
            elif any(fits(kind) for fits in (known.is_binary, known.is_large_binary, known.is_binary_view)):
                scalar = pa.scalar(text.encode(), kind)
        except (ArithmeticError, pa.ArrowException) as problem:
            raise self._wrong(literal.at, f"{text!r} does not fit column {beside.name!r} ({kind}): {problem}") from None
        except ValueError as problem:
            if "where=" in str(problem):
                raise
            raise self._wrong(literal.at, f"{text!r} does not fit column {beside.name!r} ({kind}): {problem}") from None
        if scalar is None:
            raise self._wrong(literal.at, f"{text!r} cannot be compared with column {beside.name!r}, which is {kind}")
        return pc.scalar(scalar)
