"""More ways to ask for the listed tools, training only: an intent and one clause a value, in either order.

One line a tool (its first name in `tool_list.TOOLS`, by position): intents ; then `parameter: clause ; clause`.
"""

_TABLE = """
0 | what is the weather; how is the weather; weather; the weather; tell me the weather; check the weather; is it warm; weather report; give me the weather; what are the conditions; will I freeze; how cold is it; what about the weather; temperature; how many degrees | city: in {city}; for {city}; at {city}; over in {city}; around {city} | unit: in {unit}; as {unit}; unit {unit}; with {unit}
1 | what is the weather; how is the weather; weather; tell me the weather; check the weather; weather report; temperature; what are the conditions | location: in {location}; for {location}; at {location}; around {location} | unit: in {unit}; as {unit}; with {unit}
2 | weather forecast; the forecast; how will the weather be; what weather is coming; predict the weather; outlook | city: in {city}; for {city}; around {city} | days: for {days} days; over {days} days; the next {days} days; {days} days ahead
3 | what time is it; current time; the time; tell me the time; clock; which hour is it; what is the hour; how late is it now | city: in {city}; for {city}; over in {city}; at {city}
4 | what time is it; current time; tell me the time; the time; clock time | timezone: in {timezone}; for {timezone}; zone {timezone}
5 | send an email; write an email; email; compose a mail; a mail; new email; mail | to: to {to}; for {to}; addressed to {to} | subject: subject "{subject}"; with the subject "{subject}"; titled "{subject}" | body: text "{body}"; saying "{body}"; with the words "{body}"; content "{body}"
6 | send a message; text; write a message; message; send a text; tell; a note | recipient: to {recipient}; for {recipient} | message: "{message}"; saying "{message}"; with the text "{message}"; that says "{message}"
7 | search; search the web; look up; find; find results; web search; look online; get information; show pages; google | query: for {query}; about {query}; on {query}; regarding {query} | limit: {limit} results; at most {limit} results; top {limit}; {limit} hits
8 | add; sum; add up; what is the sum; total; please add | a: {a} | b: and {b}; plus {b}
9 | multiply; the product; compute the product; please multiply | a: {a}; of {a} | b: and {b}; by {b}; times {b}
10 | divide; please divide; the quotient; compute | a: {a} | b: by {b}; over {b}; divided by {b}
11 | set a timer; start a timer; timer; countdown; new timer; a timer | minutes: for {minutes} minutes; of {minutes} minutes; {minutes} minutes; with {minutes} minutes
12 | set an alarm; wake me; alarm; ring; new alarm; get me up; the alarm clock | time: at {time}; for {time}; to {time} | day: on {day}; this {day}; next {day}
13 | remind me; set a reminder; create a reminder; a reminder; do not let me forget; reminder | text: to {text}; that I must {text}; "{text}" | date: on {date}; for {date} | time: at {time}
14 | add a task; new task; todo; put on my list; add to my list; task; create a task | task: "{task}"; to {task}; called "{task}" | priority: priority {priority}; with {priority} priority; as {priority} priority
15 | create an event; add an event; schedule; calendar entry; new event; put into the calendar; plan a meeting | title: "{title}"; called "{title}"; named "{title}" | date: on {date}; for {date} | time: at {time}; starting at {time} | person: with {person}; and invite {person}
16 | find a flight; flights; book a flight; I want to fly; search flights; a plane ticket; fly; flight | origin: from {origin}; leaving {origin}; starting in {origin} | destination: to {destination}; going to {destination} | date: on {date}; for {date} | passengers: for {passengers} people; for {passengers} passengers; {passengers} seats
17 | find a hotel; book a hotel; hotel; a room; I need a hotel; a place to stay; hotels; where can we sleep | city: in {city}; at {city}; near {city} | nights: for {nights} nights; {nights} nights | guests: for {guests} guests; for {guests} people | check_in: from {check_in}; on {check_in}; arriving {check_in}
18 | find a restaurant; restaurants; where can I eat; a place to eat; dinner; I am hungry; recommend a restaurant | city: in {city}; around {city}; near {city} | cuisine: with {cuisine} food; for {cuisine} food; serving {cuisine} food
19 | book a table; reserve a table; table; make a reservation; a reservation; dinner table | restaurant: at {restaurant}; in the {restaurant} restaurant | people: for {people}; for {people} people; for a group of {people} | time: at {time} | date: on {date}
20 | translate; translation; how do you say; what is; say; render | text: "{text}"; the text "{text}"; the words "{text}" | target_language: in {target_language}; into {target_language}; to {target_language}
21 | convert; exchange; how much is; change; calculate | amount: {amount} | from_currency: {from_currency} | to_currency: to {to_currency}; into {to_currency}; in {to_currency}
22 | exchange rate; the rate; what is the rate; current exchange rate; rate | base: from {base}; of {base} | target: to {target}; against {target}
23 | stock price; price; quote; what is the price; share price; how much is a share; value | symbol: of {symbol}; for {symbol}; {symbol}
24 | turn {state} the light; switch {state} the lights; lights {state}; put {state} the lamp; make the light go {state}; light {state} | room: in the {room}; of the {room}; for the {room} | brightness: at {brightness} percent; with {brightness} percent
25 | set the temperature; temperature; heating; make it warm; thermostat; set the heat; change the temperature | room: in the {room}; for the {room}; of the {room} | temperature: to {temperature} degrees; {temperature} degrees; at {temperature}
26 | play music; play; some music; start playing; I want to hear something; put on music; music | genre: of the style {genre}; in the genre {genre}; {genre} | artist: by {artist}; from {artist} | volume: at volume {volume}; with volume {volume}
27 | news; the latest news; headlines; articles; what is new; show news; read the news | topic: about {topic}; on {topic}; regarding {topic} | count: {count} articles; {count} items; only {count}
28 | order food; order; I want to order; a delivery; get me food; bring me | dish: {dish}; the dish {dish} | quantity: {quantity} portions; {quantity} times | address: to {address}; delivered to {address}
29 | find the contact; look up the user; who is; contact; show the user; user details; find | name: {name}; named {name}; called {name}
30 | order status; where is the order; track the order; status; what about my order; check the order; has it shipped, order | order_id: {order_id}; number {order_id}; with the number {order_id}
31 | open the file; read the file; load; show the file; open; file contents | path: {path}; at {path}; under {path}
32 | population; how many people live; number of people; the population; inhabitants | place: in {place}; of {place}; for {place}
33 | distance; how far is it; the distance; how many kilometres; how long is the way; measure the way | origin: from {origin}; starting at {origin} | destination: to {destination}; up to {destination}
34 | directions; the way; how do I get; navigate; route; plan a route; show the way | origin: from {origin} | destination: to {destination} | mode: by {mode}; with the {mode}
35 | save a contact; new contact; add a contact; store the contact; contact | name: {name}; named {name}; for {name} | phone: phone {phone}; with the number {phone} | email: email {email}; with the email {email}
36 | roll; throw; roll the dice; dice | count: {count} dice; {count} times
37 | search the shop; find a product; I want to buy; do you have; show me; product search | query: a {query}; the {query} | max_price: under {max_price} dollars; for at most {max_price} dollars | color: in {color}; colored {color}
38 | add to the cart; put into my cart; cart; shopping cart; buy | product: the {product}; a {product} | quantity: {quantity} pieces; {quantity} times
39 | horoscope; star reading; what do the stars say; read the horoscope | sign: for {sign}; of {sign}; sign {sign}
40 | create a user; new user; register; add a user; make an account; sign up; user account | username: for {username}; named {username}; {username} | email: with the email {email}; email {email} | age: age {age}; aged {age} | role: as {role}; with the role {role}
41 | count the rows; how many rows; row count; number of rows; count entries; how many entries; size | table: of {table}; in the table {table}; in {table}
"""


def parse() -> dict[int, tuple[list[str], dict[str, list[str]]]]:
    out = {}
    for line in _TABLE.strip().splitlines():
        number, intents, *clauses = line.split(" | ")
        said = {c.split(":")[0]: c.split(": ", 1)[1].split("; ") for c in clauses}
        out[int(number)] = (intents.split("; "), said)
    return out


COMBOS = parse()
OPENERS = ["", "", "", "", "please ", "can you ", "could you ", "I want this: ", "hey, ", "now ", "I need: ", "would you ", "quickly: ", "Quill, ", "next: ",
           "let's see: ", "my request: ", "kindly ", "one thing: ", "help: ", "okay, ", "I wonder: ", "today: ", "urgent: "]  # fmt: skip
JUNK = """Happy birthday|Good news|Attention|Welcome back|Congratulations|Trip|Report|Reminder|Update|Breaking news|Dear team|Thanks|Note|Hooray|Long live|
Meet|Look|Listen|Big news|Greetings|Message|Entry|Record|Case|Today|Yesterday|Tomorrow|Last week|This morning|As we heard|Word is that|Believe it or not|I think|
I hear|They say|We know|Hello again|Good morning|Well done|Appointment|Journey|Ticket|Booking|Data|Line one|Memo|Fact|Question|Story|Once more|By the way|
Here it comes|Do not forget|Very well|Just in|For the files|Personal|Private|Please note|Invite|Hire|Ask|Call|Thank|Help|Follow|Watch|Trust|Visit|Remember|
Applause for|Say hi to|All the best|So sorry|What a day|It is true|My dear|Oh dear|Guess what|Roll call|Headline|Summary|Log entry|Start|Stop|Given|Text""".replace(
    "\n", ""
).split("|")


def combo(rng, index: int) -> str | None:  # type: ignore[no-untyped-def]
    """A pattern for one tool, or None when the table has no line for it."""
    if index not in COMBOS:
        return None
    intents, said = COMBOS[index]
    intent = rng.choice(intents)
    keys = list(said)
    head = (
        keys[:1]
        if index not in (8, 9, 10, 16, 20, 21, 22, 33, 34)
        else keys[:2]
        if index != 21
        else keys[:3]
    )
    if index == 24:
        head = ["room"]
    chosen = head + [k for k in keys if k not in head and rng.random() < 0.5]
    clauses = [rng.choice(said[k]) for k in chosen]
    if index not in (8, 9, 10, 21):
        rng.shuffle(clauses)
    body = (
        rng.choice([" ", " ", ", "]).join(clauses)
        if index not in (8, 9, 10, 21)
        else " ".join(clauses)
    )
    form = rng.random()
    if form < 0.7:
        text = f"{intent} {body}"
    elif form < 0.85:
        text = f"{body}: {intent}"
    else:
        text = f"{body}, {intent}"
    text = rng.choice(OPENERS) + text
    if rng.random() < 0.7:
        text = text[0].upper() + text[1:] if text[0] != "{" else text
    return text + rng.choice(["", ".", "?", "!", "", ".", " please", ", please.", ", thanks"])
