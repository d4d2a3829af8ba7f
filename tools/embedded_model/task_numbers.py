"""Arithmetic, comparing and counting, with the work shown digit by digit in the trace.

The trace is what makes a small model right: one digit column a line, lowest first, so that every line
follows from what stands above it.
"""

from chat_format import Chat
from draw import Draw, held_out_pair
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
        return [
            f"{a} - {b}",
            f"{b} is larger: -({b} - {a})",
            *subtract_trace(b, a)[1:-1],
            f"-{b - a}",
        ]
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
    """Long division, one digit down at a time; b <= 12 so that every step is in the table."""
    lines, rest = [], 0
    for i, digit in enumerate(str(a)):
        part = rest * 10 + int(digit)
        rest = part % b
        if part >= b or i == len(str(a)) - 1:
            lines.append(f"{part}/{b}={part // b} rest {rest}")
    return [f"{a} / {b}", *lines, str(a // b)]


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
    "Answer: {e}",
    "The sum is {e}. Solve it.",
    "What number is {e}?",
    "{e} makes?",
    "{e} gives what?",
    "{e} equals what?",
    "{e} is how much?",
    "Determine {e}.",
    "Figure out {e}.",
    "Do this calculation: {e}",
    "I have to solve {e}.",
    "My teacher asks for {e}.",
    "Calculator: {e}",
    "Please give the result: {e}",
    "Result of {e}?",
    "Use your head: {e}",
    "Count for me: {e}",
    "Simplify {e}.",
    "I want to know what {e} is.",
    "Is it hard to say what {e} is?",
    "Exercise: {e}",
    "If you calculate {e}, what comes out?",
    "Could you do {e}?",
    "Check {e} for me.",
    "Show me how to do {e}.",
    "How do you work out {e}?",
    "What would {e} be?",
    "Number puzzle: {e}.",
]
ASK_NAMED = {
    "+": [
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "Sum {a} and {b}, please.",
        "add {a} to {b}",
        "What do {a} and {b} add up to?",
        "Add {a} to {b}.",
        "Add up {a} and {b}.",
        "Add together {a} and {b}.",
        "Add the numbers {a} and {b}.",
        "Can you add {a} and {b}?",
        "Please add {b} to {a}.",
        "I want to add {a} and {b}.",
        "adding {a} and {b} gives?",
        "the sum of {a} and {b}",
        "Find the sum of {a} and {b}.",
        "Give me the sum of {a} and {b}.",
        "{a} and {b}: what is the sum?",
        "What is the total of {a} and {b}?",
        "Total of {a} and {b}?",
        "How much are {a} and {b} together?",
        "{a} and {b} together make?",
        "If I add {a} and {b}, what do I get?",
        "Increase {a} by {b}.",
        "What is {b} more than {a}?",
    ],
    "-": [
        "Subtract {b} from {a}.",
        "What is the difference when you take {b} from {a}?",
        "Take {b} away from {a}.",
        "Subtract {b} from {a}, please.",
        "If I subtract {b} from {a}, what is left?",
        "What is {a} less {b}?",
        "{a} take away {b}",
        "Can you subtract {b} from {a}?",
        "subtracting {b} from {a} gives?",
        "Remove {b} from {a}.",
        "Decrease {a} by {b}.",
        "Reduce {a} by {b}.",
        "What is left if you take {b} from {a}?",
        "Take {b} from {a}.",
        "Deduct {b} from {a}.",
        "The difference {a} - {b}?",
        "Find the difference: {a} - {b}.",
        "How much is left of {a} after taking {b} away?",
    ],
    "*": [
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
        "multiply {a} and {b}",
        "How much is {a} multiplied by {b}?",
        "Multiply {a} and {b}.",
        "Multiply {a} with {b}.",
        "Multiply the numbers {a} and {b}.",
        "Can you multiply {a} by {b}?",
        "the product of {a} and {b}",
        "Find the product of {a} and {b}.",
        "Give me the product of {a} and {b}.",
        "{a} multiplied by {b}",
        "{a} multiplied by {b} is?",
        "What is {a} multiplied by {b}?",
        "If I multiply {a} by {b}, what do I get?",
        "{a} times {b} makes?",
        "What do I get when I take {a} {b} times?",
        "{a} groups of {b} make how many?",
    ],
    "/": [
        "Divide {a} by {b}.",
        "How many times does {b} go into {a}?",
        "What is {a} over {b}?",
        "Divide {a} by {b}, please.",
        "{a} divided by {b}",
        "What is {a} divided by {b}?",
        "Split {a} into {b} equal parts. How big is each?",
        "Share {a} among {b}. How much does each get?",
        "How often does {b} fit into {a}?",
        "What is the quotient of {a} and {b}?",
        "If I divide {a} by {b}, what do I get?",
    ],
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
    "{a}{s}{b}",
    "{a}{w}{b}得多少？",
    "{a}{w}{b}的结果是什么？",
    "{a}{w}{b}的答案",
    "计算：{a}{s}{b}",
    "计算{a}{w}{b}",
    "求{a}{s}{b}",
    "{a} {s} {b} 是多少",
    "{a}{s}{b}等于？",
    "你能算{a}{w}{b}吗？",
    "告诉我{a}{w}{b}等于多少",
    "如果{a}{w}{b}，结果是多少？",
    "数学题：{a}{s}{b}=？",
]
ANSWERS = [
    "{a} {s} {b} = {r}.",
    "{a} {s} {b} = {r}.",
    "{a} {s} {b} is {r}.",
    "The answer is {r}.",
    "{r}",
]


# Ways to name a calculation as something to do or as a number, and frames around them; training pairs them freely.
DO = {
    "+": ["add {a} and {b}", "add {b} to {a}", "add up {a} and {b}", "sum {a} and {b}", "sum up {a} and {b}", "add together {a} and {b}",
          "put {a} and {b} together", "increase {a} by {b}", "add {a} with {b}", "total {a} and {b}"],
    "-": ["subtract {b} from {a}", "take {b} from {a}", "take {b} away from {a}", "deduct {b} from {a}", "reduce {a} by {b}", "remove {b} from {a}",
          "decrease {a} by {b}", "take away {b} from {a}"],
    "*": ["multiply {a} by {b}", "multiply {a} and {b}", "multiply {a} with {b}", "take {a} times {b}", "multiply the numbers {a} and {b}"],
    "/": ["divide {a} by {b}", "split {a} by {b}", "share {a} among {b}", "split {a} into {b} equal parts"],
}  # fmt: skip
NUMBER = {
    "+": ["the sum of {a} and {b}", "the total of {a} and {b}", "{a} plus {b}", "{a} and {b} together", "{a} added to {b}", "{b} more than {a}"],
    "-": ["what is left of {a} without {b}", "the rest of {a} when {b} are gone", "{a} without {b}", "the remainder of {a} after losing {b}",
          "how much of {a} remains after removing {b}", "{a} after subtracting {b}", "the rest of {a} after {b} are spent", "the difference of {a} and {b}", "{a} minus {b}", "{a} less {b}", "{b} less than {a}", "{a} take away {b}", "{a} reduced by {b}"],
    "*": ["{a} lots of {b}", "{a} heaps of {b}", "{a} groups with {b} each", "{a} crowds of {b}", "{a} classes of {b}", "{a} stacks of {b}", "{a} sets of {b}", "{a} packs of {b}", "{a} bundles of {b}", "{a} rows of {b}", "{a} teams of {b}", "{a} bags of {b}",
          "{a} piles of {b}", "{a} boxes of {b}", "the product of {a} and {b}", "{a} times {b}", "{a} multiplied by {b}", "{a} multiplied with {b}"],
    "/": ["how often {b} goes into {a}", "how many times {b} is in {a}", "how often {b} fits in {a}", "the number of times {b} goes into {a}", "the quotient of {a} and {b}", "{a} divided by {b}", "{a} over {b}", "{a} split by {b}"],
}  # fmt: skip
DO_FRAMES = ["{x}.", "{x}", "{x}, please.", "Please {x}.", "Can you {x}?", "Could you {x}?", "I want to {x}.", "Help me {x}.", "Let us {x}.", "Now {x}.",
             "If I {x}, what do I get?", "What do I get if I {x}?", "What is the result when you {x}?", "How do I {x}?", "Try to {x}.", "You should {x}.",
             "I have to {x}.", "What happens if we {x}?", "Your task: {x}.", "Would you {x} for me?", "When I {x}, what comes out?", "We need to {x}."]  # fmt: skip
LABELS = """Sum|Task|Problem|Maths|Math|Homework|Number one|Puzzle|Test|Quiz|Example|Drill|Practice|Next one|Calculation|Worksheet|Riddle|Challenge|Lesson|Training|
Point five|Part two|Warm-up|Question three|Round one|Exam|Please solve|My sum|Easy one|Hard one|Input|Equation|Try this|Assignment|Step one|Workout|Unit one|Query""".replace(
    "\n", ""
).split("|")
NUMBER_FRAMES = ["What is {x}?", "{x}?", "{x}", "{x} is", "{x} is what?", "{x} make how much?", "{x}: how many is that?", "{x} are how many?", "How many are {x}?", "{x} give how many?", "{x} make what number?", "{x} makes", "{x} equals?", "Tell me {x}.", "Give me {x}.", "Find {x}.", "I need {x}.",
                 "Calculate {x}.", "Compute {x}.", "How much is {x}?", "Do you know {x}?", "What number is {x}?", "Work out {x}.", "Please tell me {x}.",
                 "Can you give me {x}?", "I am looking for {x}.", "Write down {x}.", "Determine {x}.", "Which number is {x}?", "Say {x}."]  # fmt: skip


def named_question(d: Draw, op: str) -> str:
    """A pattern with {a} and {b} that says the operation in words."""
    if d.held_out or d.chance(0.3):
        return d.pattern(ASK_NAMED[op], drop=False)
    doing = d.chance(0.5)
    text = d.any(DO_FRAMES if doing else NUMBER_FRAMES).replace(
        "{x}", d.any((DO if doing else NUMBER)[op])
    )
    return text[0].upper() + text[1:] if d.chance(0.8) else text


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
            a = max(a, 1)
            return a * b, a
        return (a, b) if d.chance(0.6) else (b, a)
    top = 999
    if not d.held_out:
        top = d.any([9, 20, 99, 99, 999, 999, 999, 999, 9999])
    low = 100 if top == 999 and d.chance(0.5) else 0
    a, b = d.pair(op, (low, low if d.chance(0.7) else 0), (top, top if d.chance(0.8) else 99))
    return (a, a) if not d.held_out and d.chance(0.01) and not held_out_pair(op, a, a) else (a, b)


def question(d: Draw, op: str, a: int, b: int) -> tuple[str, str]:
    """(text, answer form) for a calculation."""
    r = result(op, a, b)[1]
    sign = d.any(SIGNS[op])
    if d.chance(0.18):
        text = d.phrase(ASK_ZH).format(a=a, b=b, w=ZH[op], s=sign)
        form = d.any([f"{a} {sign} {b} = {r}。", f"{a}{ZH[op]}{b}等于{r}。", f"答案是{r}。"])
        return text, form
    if d.chance(0.35):
        return named_question(d, op).format(a=a, b=b), d.any(ANSWERS).format(a=a, b=b, s=sign, r=r)
    gap = " " if d.chance(0.7) else ""
    e = f"{a} {WORDS[op]} {b}" if d.chance(0.25) else f"{a}{gap}{sign}{gap}{b}"
    text = (
        d.pattern(ASK)
        if d.held_out or d.chance(0.8)
        else d.any(LABELS) + d.any([": ", ": ", " - ", ", "]) + "{e}"
    )
    return text.format(e=e), d.any(ANSWERS).format(a=a, b=b, s=sign, r=r)


def arithmetic(d: Draw, op: str | None = None) -> Chat:
    op = op or d.any("++--**/")
    a, b = operands(d, op)
    trace, _r = result(op, a, b)
    text, answer = question(d, op, a, b)
    easy = max(a, b) <= 100 or op == "*"
    return Chat(
        [{"role": "user", "content": text}], answer, "\n".join(trace), direct=easy or d.chance(0.3)
    )


STORIES = {
    "+": [
        "{n} has {a} {i} and gets {b} more. How many {i} does {n} have now?",
        "There are {a} {i} in one box and {b} in another. How many {i} are there in total?",
        "{n} counted {a} {i} in the morning and {b} in the evening. How many is that altogether?",
        "A shop sold {a} {i} on Monday and {b} on Tuesday. How many did it sell in both days?",
        "{n} bought {a} {i}, then bought {b} more. How many in all?",
        "{n} has {a} {i}. {n} finds {b} more. How many are there now?",
        "First {a} {i} arrive, then {b} more. How many arrived altogether?",
        "{n} owns {a} {i} and receives {b} as a present. How many {i} is that now?",
        "In the bag are {a} {i}. We put in {b} more. How many {i} are in the bag?",
        "{n} picked {a} {i} today and {b} yesterday. How many {i} in total?",
        "One class has {a} {i}, the other has {b}. How many together?",
        "{n} read {a} pages before lunch and {b} after it. How many pages altogether?",
        "There were {a} {i}. Then {b} were added. How many {i} now?",
        "{a} {i} and {b} {i}: how many {i} are that together?",
    ],
    "-": [
        "{n} has {a} {i} and gives away {b}. How many are left?",
        "There were {a} {i} on the shelf and {b} were sold. How many remain?",
        "{n} had {a} {i} but lost {b} of them. How many does {n} still have?",
        "Of {a} {i}, {b} are broken. How many are not broken?",
        "{n} had {a} {i} and gave {b} to a friend. How many does {n} have left?",
        "{n} gives {b} of {a} {i} away. How many remain?",
        "From {a} {i}, {n} uses {b}. How many are left over?",
        "{n} has {a} {i} and sells {b}. How many {i} are left?",
        "A box holds {a} {i}. {n} takes out {b}. How many stay in the box?",
        "{n} eats {b} of the {a} {i}. How many are left?",
        "There are {a} {i}. {b} fall down and break. How many whole {i} are left?",
        "{a} {i} were in the room, {b} were carried out. How many are still there?",
    ],
    "*": [
        "There are {a} boxes with {b} {i} each. How many {i} are there?",
        "{n} buys {a} packs of {b} {i}. How many {i} is that?",
        "Each of {a} friends brings {b} {i}. How many {i} do they bring together?",
        "{a} rows of {b} {i}: how many {i} in total?",
        "{n} has {a} bags. Each bag holds {b} {i}. How many {i} are there in total?",
        "There are {b} {i} in a pack. How many {i} are in {a} packs?",
        "{a} shelves with {b} {i} on each: how many {i}?",
        "Every day {n} makes {b} {i}. How many {i} after {a} days?",
        "{a} children get {b} {i} each. How many {i} is that in all?",
        "A row has {b} {i}. How many {i} do {a} rows have?",
        "{n} fills {a} boxes with {b} {i} each. How many {i} altogether?",
        "In each of {a} rooms are {b} {i}. How many {i} are that together?",
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
    text = d.pattern(STORIES[op], drop=False).format(n=d.value(NAMES), a=a, b=b, i=item)
    answer = d.any(
        [f"{r} {item}.", f"The answer is {r} {item}.", f"{a} {op} {b} = {r}, so {r} {item}."]
    )
    return Chat(
        [{"role": "user", "content": text}], answer, "\n".join(trace), direct=max(a, b) < 21
    )


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
    return (
        f"{d.int(0, 20)}.{d.int(1, 9)}" if d.chance(0.5) else f"{d.int(0, 20)}.{d.int(1, 99):02d}"
    )


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
        answer = d.any(
            [f"{big} is larger than {small}.", f"{big} is larger.", f"The larger number is {big}."]
        )
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
    text = d.pattern(COUNT).format(a=a, b=b).replace("up " if step < 0 else "\0", "")
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
    if form.endswith(("even number?", "even?")):
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
    text = d.pattern(SEQUENCE).format(s=", ".join(map(str, terms)))
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
    text = d.pattern(SHOPPING).format(i=d.value(ITEMS if d.chance(0.7) else FOODS), n=n, p=p)
    answer = d.any(
        [f"{n * p} dollars.", f"They cost {n * p} dollars.", f"{n} * {p} = {n * p} dollars."]
    )
    return Chat([{"role": "user", "content": text}], answer, "\n".join(multiply_trace(n, p)))
