"""Arithmetic, comparing and counting, with the work shown digit by digit in the trace.

The trace is what makes a small model right: one digit column a line, lowest first, so that every line
follows from what stands above it.
"""

from chat_format import Chat
from draw import Draw
from words import FOODS, ITEMS, NAMES

Trace = list[str]


def digits(n: int) -> list[int]:
    """Digits of n, ones first."""
    return [int(c) for c in reversed(str(n))]


def add_trace(a: int, b: int) -> Trace:
    """Column addition of two whole numbers >= 0."""
    x, y, carry, lines = digits(a), digits(b), 0, []
    for i in range(max(len(x), len(y))):
        terms = [col[i] for col in (x, y) if i < len(col)] + ([carry] if carry else [])
        total = sum(terms)
        carry = total // 10
        left = "+".join(map(str, terms))
        lines.append(f"{left}={total} write {total % 10}" + (f" carry {carry}" if carry else ""))
    if carry:
        lines.append(f"write {carry}")
    return [f"{a} + {b}", *lines, str(a + b)]


def subtract_trace(a: int, b: int) -> Trace:
    """Column subtraction; turned round when b is larger."""
    if b > a:
        return [f"{a} - {b}", f"{b} is larger: -({b} - {a})", *subtract_trace(b, a)[1:-1], f"-{b - a}"]
    x, y, borrow, lines = digits(a), digits(b), 0, []
    for i, top in enumerate(x):
        low = y[i] if i < len(y) else 0
        tail = f"-{low}" + ("-1" if borrow else "")
        need = low + borrow
        if top < need:
            lines.append(f"{top}{tail} borrow {top + 10}{tail}={top + 10 - need}")
        else:
            lines.append(f"{top}{tail}={top - need}")
        borrow = int(top < need)
    return [f"{a} - {b}", *lines, str(a - b)]


def multiply_trace(a: int, b: int) -> Trace:
    """Split the larger factor into tens and ones, then add the two parts."""
    x, y = min(a, b), max(a, b)
    if y <= 12:
        return [f"{a} * {b}", f"{x}*{y}={x * y}"]
    tens, ones = y // 10 * 10, y % 10
    if ones == 0:
        return [f"{a} * {b}", f"{x}*{y // 10}={x * y // 10}", str(x * y)]
    first, second = x * tens, x * ones
    lines = [f"{x}*{tens // 10}={first // 10}, {x}*{tens}={first}", f"{x}*{ones}={second}"]
    return [f"{a} * {b}", *lines, *add_trace(first, second)]


def divide_trace(a: int, b: int) -> Trace:
    return [f"{a} / {b}", f"{b}*{a // b}={a}", str(a // b)]


WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
ZH = {"+": "加", "-": "减", "*": "乘以", "/": "除以"}
SIGNS = {"+": ["+"], "-": ["-", "-", "−"], "*": ["*", "x", "×"], "/": ["/", "÷"]}

ASK = [
    "What is {e}?",
    "what is {e}",
    "What's {e}?",
    "whats {e}",
    "Calculate {e}.",
    "Compute {e}.",
    "calculate {e}",
    "{e} = ?",
    "{e}=",
    "{e}",
    "{e}?",
    "How much is {e}?",
    "how much is {e}",
    "Please compute {e}.",
    "Can you work out {e}?",
    "Solve: {e}",
    "Work out {e} for me.",
    "I need the result of {e}.",
    "Tell me {e}.",
    "What do you get for {e}?",
    "What does {e} equal?",
    "Give me the value of {e}.",
    "Evaluate {e}.",
    "Quick question: what is {e}?",
    "Could you tell me what {e} is?",
    "What is the result of {e}?",
    "Help me with {e}, please.",
    "Math question: {e}",
    "Find {e}.",
    "Do you know what {e} is?",
    "Let's do some maths. {e}?",
    "Hi! What is {e}?",
]
ASK_NAMED = {
    "+": [
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "Sum {a} and {b}, please.",
        "add {a} to {b}",
        "What do {a} and {b} add up to?",
    ],
    "-": ["Subtract {b} from {a}.", "What is the difference when you take {b} from {a}?", "Take {b} away from {a}."],
    "*": [
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
        "multiply {a} and {b}",
        "How much is {a} multiplied by {b}?",
    ],
    "/": ["Divide {a} by {b}.", "How many times does {b} go into {a}?", "What is {a} over {b}?"],
}
ASK_ZH = [
    "{a}{w}{b}等于多少？",
    "{a}{w}{b}等于几？",
    "{a} {w} {b} 等于多少?",
    "请计算{a}{s}{b}。",
    "请问{a}{s}{b}等于多少？",
    "{a}{w}{b}是多少？",
    "算一下{a}{s}{b}",
    "{a} {s} {b} = ?（请用中文回答）",
    "帮我算{a}{w}{b}。",
]
ANSWERS = ["{a} {s} {b} = {r}.", "{a} {s} {b} = {r}.", "{a} {s} {b} is {r}.", "The answer is {r}.", "{r}"]


def result(op: str, a: int, b: int) -> tuple[Trace, int]:
    if op == "+":
        return add_trace(a, b), a + b
    if op == "-":
        return subtract_trace(a, b), a - b
    if op == "*":
        return multiply_trace(a, b), a * b
    return divide_trace(a, b), a // b


def operands(d: Draw, op: str) -> tuple[int, int]:
    """Operands in the range that the card promises; small ones come up more often in training."""
    if op in "*/":
        a, b = d.pair("*", (0, 0), (12, 99))
        if op == "/":
            b = max(b, 1)
            return a * b, b
        return (a, b) if d.chance(0.6) else (b, a)
    top = 999
    if not d.held_out:
        top = d.any([9, 20, 99, 99, 999, 999, 999, 999, 9999])
    low = 100 if top == 999 and d.chance(0.5) else 0
    return d.pair(op, (low, low if d.chance(0.7) else 0), (top, top if d.chance(0.8) else 99))


def question(d: Draw, op: str, a: int, b: int) -> tuple[str, str]:
    """(text, answer form) for a calculation."""
    r = result(op, a, b)[1]
    sign = d.any(SIGNS[op])
    if d.chance(0.18):
        text = d.phrase(ASK_ZH).format(a=a, b=b, w=ZH[op], s=sign)
        form = d.any([f"{a} {sign} {b} = {r}。", f"{a}{ZH[op]}{b}等于{r}。", f"答案是{r}。"])
        return text, form
    if d.chance(0.25):
        return d.phrase(ASK_NAMED[op]).format(a=a, b=b), d.any(ANSWERS).format(a=a, b=b, s=sign, r=r)
    gap = " " if d.chance(0.7) else ""
    e = f"{a} {WORDS[op]} {b}" if d.chance(0.25) else f"{a}{gap}{sign}{gap}{b}"
    return d.phrase(ASK).format(e=e), d.any(ANSWERS).format(a=a, b=b, s=sign, r=r)


def arithmetic(d: Draw, op: str | None = None) -> Chat:
    op = op or d.any("++--**/")
    a, b = operands(d, op)
    trace, r = result(op, a, b)
    text, answer = question(d, op, a, b)
    easy = max(a, b) <= 100 or op == "*"
    return Chat([{"role": "user", "content": text}], answer, "\n".join(trace), direct=easy or d.chance(0.3))


STORIES = {
    "+": [
        "{n} has {a} {i} and gets {b} more. How many {i} does {n} have now?",
        "There are {a} {i} in one box and {b} in another. How many {i} are there in total?",
        "{n} counted {a} {i} in the morning and {b} in the evening. How many is that altogether?",
        "A shop sold {a} {i} on Monday and {b} on Tuesday. How many did it sell in both days?",
        "{n} bought {a} {i}, then bought {b} more. How many in all?",
    ],
    "-": [
        "{n} has {a} {i} and gives away {b}. How many are left?",
        "There were {a} {i} on the shelf and {b} were sold. How many remain?",
        "{n} had {a} {i} but lost {b} of them. How many does {n} still have?",
        "Of {a} {i}, {b} are broken. How many are not broken?",
    ],
    "*": [
        "There are {a} boxes with {b} {i} each. How many {i} are there?",
        "{n} buys {a} packs of {b} {i}. How many {i} is that?",
        "Each of {a} friends brings {b} {i}. How many {i} do they bring together?",
        "{a} rows of {b} {i}: how many {i} in total?",
    ],
}
COUNTED = "apples books pens eggs stamps coins cards marbles shells cups tickets buttons stickers candles".split()


def story(d: Draw) -> Chat:
    op = d.any("+-*")
    top = (12, 60) if op == "*" else (d.any([20, 99, 300]),) * 2
    a, b = d.pair(op, (2, 2), top)
    if op == "-" and b > a:
        a, b = b, a
    trace, r = result(op, a, b)
    item = d.any(COUNTED)
    text = d.phrase(STORIES[op]).format(n=d.value(NAMES), a=a, b=b, i=item)
    answer = d.any([f"{r} {item}.", f"The answer is {r} {item}.", f"{a} {op} {b} = {r}, so {r} {item}."])
    return Chat([{"role": "user", "content": text}], answer, "\n".join(trace), direct=max(a, b) < 21)


COMPARE = [
    "Which is larger, {a} or {b}?",
    "Which number is bigger: {a} or {b}?",
    "Is {a} greater than {b}?",
    "Compare {a} and {b}.",
    "What is the bigger one of {a} and {b}?",
    "{a} or {b}, which one is greater?",
    "{a} and {b}, which is bigger?",
    "{a}和{b}，哪个更大？",
    "{a} and {b}, 哪个更大?",
    "{a}和{b}哪个大？",
]


def decimal(d: Draw) -> str:
    return f"{d.int(0, 20)}.{d.int(1, 9)}" if d.chance(0.5) else f"{d.int(0, 20)}.{d.int(1, 99):02d}"


def compare_trace(a: str, b: str) -> list[str]:
    x, y = a.split("."), b.split(".")
    if int(x[0]) != int(y[0]) or len(x) == 1:
        big, small = (a, b) if float(a) > float(b) else (b, a)
        return [f"{int(float(big))} > {int(float(small))}"]
    width = max(len(x[1]), len(y[1]))
    left, right = x[1].ljust(width, "0"), y[1].ljust(width, "0")
    sign = ">" if left > right else "<"
    return [f"whole parts: {x[0]} = {y[0]}", f"after the point: {left} {sign} {right}"]


def compare(d: Draw) -> Chat:
    if d.chance(0.6):
        a = decimal(d)
        b = a.split(".")[0] + "." + decimal(d).split(".")[1] if d.chance(0.7) else decimal(d)
    else:
        top = d.any([9, 99, 999, 9999])
        a, b = str(d.int(0, top)), str(d.int(0, top))
    if float(a) == float(b):
        b = str(int(float(a)) + 1)
        a = str(int(float(a)))
    form = d.phrase(COMPARE)
    big, small = (a, b) if float(a) > float(b) else (b, a)
    trace = [*compare_trace(a, b), f"{big} is larger"]
    if form.startswith("Is"):
        answer = f"Yes, {a} is greater than {b}." if big == a else f"No, {a} is less than {b}."
    elif "哪个" in form:
        answer = d.any([f"{big}更大。", f"{big}比{small}大。"])
    else:
        answer = d.any([f"{big} is larger than {small}.", f"{big} is larger.", f"The larger number is {big}."])
    return Chat([{"role": "user", "content": form.format(a=a, b=b)}], answer, "\n".join(trace))


COUNT = [
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Count up from {a} to {b} for me.",
    "Can you count from {a} to {b}?",
    "Write all whole numbers from {a} to {b}.",
    "从{a}数到{b}。",
]


def count(d: Draw) -> Chat:
    a = d.int(0, 90)
    b = a + d.int(3, 40 if d.chance(0.1) else 12)
    if d.chance(0.2):
        a, b = d.int(5, 12), 1
    step = 1 if b > a else -1
    text = d.phrase(COUNT).format(a=a, b=b).replace("up " if step < 0 else "\0", "")
    answer = ", ".join(str(n) for n in range(a, b + step, step)) + "."
    return Chat([{"role": "user", "content": text}], answer, f"Start at {a} and stop at {b}.")


PARITY = [
    "Is {n} even or odd?",
    "Is {n} an even number?",
    "Is {n} odd?",
    "Even or odd: {n}?",
    "Tell me if {n} is even or odd.",
    "is the number {n} even?",
]


def parity(d: Draw) -> Chat:
    n = d.int(0, 999)
    kind = "odd" if n % 2 else "even"
    form = d.phrase(PARITY)
    answer = f"{n} is {kind}."
    if form.endswith("even number?") or form.endswith("even?"):
        answer = ("Yes, " if kind == "even" else "No, ") + answer
    if form == "Is {n} odd?":
        answer = ("Yes, " if kind == "odd" else "No, ") + answer
    think = f"The last digit is {n % 10}, which is {kind}."
    return Chat([{"role": "user", "content": form.format(n=n)}], answer, think)


SEQUENCE = [
    "What comes next: {s}?",
    "Continue the sequence: {s}",
    "What is the next number in {s}?",
    "{s}, what comes next?",
    "Find the next number: {s}, ...",
]


def sequence(d: Draw) -> Chat:
    start, step = d.int(0, 30), d.int(1, 10)
    terms = [start + step * i for i in range(d.int(3, 5))]
    text = d.phrase(SEQUENCE).format(s=", ".join(map(str, terms)))
    nxt = terms[-1] + step
    answer = d.any([f"{nxt}.", f"The next number is {nxt}.", f"Next comes {nxt}."])
    think = f"Each number is {step} more than the one before. {terms[-1]} + {step} = {nxt}"
    return Chat([{"role": "user", "content": text}], answer, think)


SHOPPING = [
    "A {i} costs {p} dollars. How much do {n} cost?",
    "If one {i} is {p} dollars, what do {n} of them cost?",
    "What is the price of {n} when a {i} costs {p} dollars?",
    "I buy {n} of something that costs {p} dollars each. What do I pay?",
]


def shopping(d: Draw) -> Chat:
    n, p = d.pair("*", (2, 2), (9, 40))
    text = d.phrase(SHOPPING).format(i=d.value(ITEMS if d.chance(0.7) else FOODS), n=n, p=p)
    answer = d.any([f"{n * p} dollars.", f"They cost {n * p} dollars.", f"{n} * {p} = {n * p} dollars."])
    return Chat([{"role": "user", "content": text}], answer, "\n".join(multiply_trace(n, p)))
