"""Pieces of text with named fields, for JSON extraction: whole sentences, and clauses that combine freely."""

from typing import NamedTuple


class Record(NamedTuple):
    """A kind of text: fields `name/other name:kind`, sentences that each use all the fields they name."""

    fields: list[str]
    texts: list[str]


def record(fields: str, texts: str) -> Record:
    return Record(fields.split(), texts.strip().splitlines())


RECORDS = [
    record("name/full_name/person:full_name age:age city/location/hometown:city job/occupation/profession:job",
           """{name} is {age} years old and lives in {city}. {name} works as a {job}.
My neighbour {name}, a {age} year old {job}, moved here from {city}.
{name} ({age}), {job}, {city}
Meet {name}! At {age}, this {job} calls {city} home.
In {city} we talked to {name}, who is {age} and earns a living as a {job}.
The {job} {name} was born in {city} and is now {age}.
{name}, aged {age}, has been a {job} in {city} for years.
Yesterday a {job} named {name} from {city} turned {age}.
{name} is a {job}. {name} lives in {city} and is {age}.
At the age of {age}, {name} left {city} to become a {job}.
Say hello to {name}, {age}, our new {job} from {city}.
I met {name} in {city}. {name} is a {job} and {age} years old.
Name: {name}. Age: {age}. City: {city}. Job: {job}.
We interviewed the {age} year old {job} {name} in {city} last week.
{name} from {city}, a {job}, celebrates turning {age}.
As a {job} in {city}, {name} is busy even at {age}.
"I love {city}", says {name}, a {job} who is {age}.
There is a {job} in {city}. The name is {name}, the age is {age}."""),
    record("name/person:name age:age",
           """{name} is {age} years old.
{name} is {age}.
My friend {name} just turned {age}.
Her name is {name} and she is {age}.
There is a boy called {name}, {age} years of age.
I am {name} and I am {age} years old.
Happy birthday {name}, {age} today!
This is {name}. {name} turned {age} today.
{name}, {age}
I know {name}, who is {age}.
Little {name} will be {age} tomorrow.
At {age}, {name} can already swim.
{age} years ago {name} was born.
Name {name}, age {age}.
My brother {name} is {age} years of age.
My sister is {name}. She is {age}.
You must be {name}. Are you {age} already?"""),
    record("name/customer/buyer:full_name product/item:item quantity/amount:small price/cost:price",
           """{name} ordered {quantity} pieces of the {product} for {price} dollars.
Order: {quantity} x {product}, {price} dollars, customer {name}.
The customer {name} bought {quantity} of our {product} and paid {price} dollars.
We sold {quantity} units of the {product} to {name} at a price of {price}.
{name} paid {price} dollars for the {product}, quantity {quantity}.
Receipt for {name}: {product}, {quantity} pieces, total {price}.
{name} wants {quantity} of the {product} and pays {price} dollars.
{quantity} of the {product} went to {name} for {price} dollars.
Thank you, {name}! You ordered {quantity} pieces of the {product} for {price} dollars.
Customer {name} bought the {product} ({quantity} pieces, {price} dollars).
For {price} dollars {name} got {quantity} of the {product}.
Sold to {name}: {quantity} x {product} at {price}.
The {product} was sold {quantity} times to {name}, price {price}.
We ship {quantity} units of the {product} to {name}. The price is {price}.
{name} took {quantity} pieces. Product: {product}. Price: {price}.
Please send me {quantity} of the {product}. I pay {price} dollars. {name}"""),
    record("invoice_number/invoice/id:code customer/company/client:company total/amount:price date/due_date:date",
           """Invoice {invoice_number} for {customer}, total {total} dollars, dated {date}.
{customer} owes us {total} dollars on invoice {invoice_number} from {date}.
On {date} we sent invoice {invoice_number} to {customer}. The amount is {total}.
Please pay invoice {invoice_number}: {total} dollars. Date: {date}. Client: {customer}.
The bill {invoice_number} of {date} to {customer} comes to {total}.
{customer} got invoice {invoice_number} on {date}. It is about {total} dollars.
Invoice number {invoice_number}, date {date}, customer {customer}, total {total}.
The invoice {invoice_number} of {total} dollars to {customer} is dated {date}.
We billed {customer} {total} dollars on {date} with invoice {invoice_number}.
{total} dollars are due from {customer}. See invoice {invoice_number} of {date}.
Dear {customer}, your invoice {invoice_number} from {date} amounts to {total} dollars.
To {customer}: invoice {invoice_number}, {date}, {total} dollars.
On {date} {customer} received the bill {invoice_number} over {total}."""),
    record("event/title:title date/day:date time/start:clock city/place/location:city",
           """The event "{event}" takes place in {city} on {date} at {time}.
Join us for "{event}" at {time} on {date} in {city}.
"{event}", {city}, {date}, {time}
On {date} the doors in {city} open at {time} for "{event}".
We meet in {city} for "{event}". It starts at {time} on {date}.
Save the date: {date}, {time}, "{event}" in {city}.
"{event}" is on {date} in {city}, and it starts at {time}.
Come to {city} for "{event}" on {date}, {time}.
{city} hosts "{event}" on {date} at {time}.
At {time} on {date} we start "{event}" in {city}.
Event: "{event}". City: {city}. Date: {date}. Time: {time}.
The next "{event}" will be in {city} on {date}; doors open at {time}.
Do not miss "{event}"! {date}, {time}, {city}.
From {time} on you can visit "{event}" in {city} on {date}.
{city} opens its doors on {date} at {time} for "{event}"."""),
    record("origin/from:city destination/to:city date/departure:date passengers/people:small",
           """A flight from {origin} to {destination} on {date} for {passengers} passengers.
{passengers} people travel from {origin} to {destination} on {date}.
We leave {origin} on {date} and arrive in {destination}; there are {passengers} of us.
On {date}, {passengers} travellers fly to {destination}. They start in {origin}.
Trip: {origin} to {destination}, {date}, {passengers} persons.
{passengers} persons fly from {origin} to {destination} on {date}.
Departure: {origin}. Arrival: {destination}. Date: {date}. Passengers: {passengers}.
From {origin} we go to {destination} on {date}, {passengers} people in all.
A group of {passengers} goes from {origin} to {destination} on {date}.
On {date} a bus with {passengers} people leaves {origin} for {destination}.
Ticket {origin} - {destination}, {date}, {passengers} persons.
Journey from {origin} to {destination} on {date} with {passengers} travellers.
We are {passengers} and fly to {destination} from {origin} on {date}.
Start: {origin}, goal: {destination}, {date}, {passengers} people."""),
    record("title/book:title author/writer:full_name year/published:year pages/num_pages:number",
           """The book "{title}" by {author} came out in {year} and has {pages} pages.
{author} wrote "{title}" in {year}. It has {pages} pages.
"{title}" ({year}), {author}, {pages} pages
In {year}, {author} published "{title}", a book of {pages} pages.
I am reading "{title}", {pages} pages long, written by {author} in {year}.
{author} is the author of "{title}", {pages} pages, from {year}.
"{title}" was written by {author}. It was published in {year} and is {pages} pages long.
With {pages} pages, "{title}" is the longest book by {author} ({year}).
The novel "{title}" appeared in {year}. Author: {author}. Pages: {pages}.
{year} saw the book "{title}" by {author} with {pages} pages.
"{title}" by {author}, {year}, {pages} pages."""),
    record("product/item/name:item color/colour:colour price/cost:price stock/quantity:number",
           """The {color} {product} costs {price} dollars. We have {stock} in stock.
We have {stock} of the {product} in {color}, each for {price} dollars.
For sale: {product}, {color}, {price} dollars, {stock} left.
There are {stock} {color} ones of the {product} left at {price} each.
{product}, color {color}, price {price}, stock {stock}
We sell the {product}. It is {color}, costs {price} dollars, and {stock} are left.
There are {stock} pieces of the {color} {product} at {price} dollars.
{stock} x {product} in {color} for {price} dollars each.
The price of the {color} {product} is {price}, stock {stock}.
Our {product} comes in {color} for {price} dollars; {stock} in stock.
In stock: {stock} of the {product} ({color}), {price} dollars."""),
    record("name/contact:full_name email:email phone/phone_number:phone company/employer:company",
           """You can reach {name} of {company} at {email} or {phone}.
{name}, {company}, {email}, {phone}
Contact {name} by phone at {phone} or by email at {email}. Company: {company}.
My name is {name}, I work for {company}. Mail me at {email} or call {phone}.
For {company} please write to {name} ({email}, tel. {phone}).
{name} works for {company}. Phone: {phone}. Email: {email}.
Write to {email} or call {phone} and ask for {name} of {company}.
I am {name} from {company}. My mail is {email} and my phone is {phone}.
Call {name} at {phone}. {company}, {email}.
{company} has a new contact: {name}, {phone}, {email}.
Hello, here is {name} from {company}; you can mail {email} or ring {phone}.
If you need {company}, call {phone} or write to {name} at {email}.
Best regards, {name}, {company}, {phone}, {email}"""),
    record("name/pet/pet_name:name animal/species/kind:enum(cat,dog,rabbit,parrot,hamster,horse,turtle) age:small owner:full_name",
           """{name} is a {age} year old {animal} that belongs to {owner}.
{owner} has a {animal} called {name}. It is {age} years old.
The {animal} {name}, {age}, lives with {owner}.
Lost: a {animal} named {name}, {age} years old. Owner: {owner}.
Our patient is {name}, a {animal} of {age} years. The owner is {owner}.
A {animal} named {name} lives with {owner}. It is {age}.
{name} is the {animal} of {owner} and {age} years old.
Owner: {owner}. Animal: {animal}. Name: {name}. Age: {age}.
{owner} came with {name}, a {age} year old {animal}.
We treated the {animal} {name} ({age}) of {owner}.
{owner} loves {name}, the {animal}, who is {age} now.
My name is {owner} and my {animal} {name} is {age}.
At {age}, the {animal} {name} is still wild, says {owner}.
The {age} year old {animal} of {owner} is called {name}."""),
    record("patient/name:full_name doctor/physician:full_name date/day:date time/hour:clock",
           """{patient} has an appointment with Dr. {doctor} on {date} at {time}.
Appointment: {patient}, {date}, {time}, with Dr. {doctor}.
Dr. {doctor} will see {patient} at {time} on {date}.
On {date} at {time}, {patient} visits Dr. {doctor}.
{patient} sees Dr. {doctor} on {date} at {time}.
Dr. {doctor} expects {patient} on {date}, {time}.
Patient: {patient}. Doctor: Dr. {doctor}. Date: {date}. Time: {time}.
We booked {patient} with Dr. {doctor} for {date} at {time}.
At {time} on {date}, Dr. {doctor} examines {patient}.
{patient} should come to Dr. {doctor} at {time} on {date}.
Reminder for {patient}: Dr. {doctor}, {date}, {time}.
Your doctor, Dr. {doctor}, will meet you on {date} at {time}, {patient}."""),
    record("city/place:city temperature/degrees:degrees condition/sky:enum(sunny,rainy,cloudy,windy,foggy,snowy) humidity:percent",
           """It is {temperature} degrees and {condition} in {city}, humidity {humidity} percent.
Weather in {city}: {condition}, {temperature} degrees, {humidity} percent humidity.
{city} is {condition} today with {temperature} degrees and a humidity of {humidity} percent.
Today {city} has {humidity} percent humidity at {temperature} degrees and is {condition}.
In {city} it is {condition}, {temperature} degrees, with {humidity} percent humidity.
{temperature} degrees, {condition}, humidity {humidity} percent: that is {city} today.
A {condition} day in {city}: {temperature} degrees and {humidity} percent humidity.
Report from {city}: {condition}, {temperature} degrees, humidity {humidity} percent.
The humidity in {city} is {humidity} percent, it is {condition} and {temperature} degrees.
{condition} weather, {temperature} degrees and {humidity} percent humidity were measured in {city}."""),
    record("company/employer:company position/role/job:job salary/pay:big city/location:city",
           """{company} is looking for a {position} in {city}. The salary is {salary} a month.
Job offer: {position} at {company} in {city}, {salary} per month.
In {city}, {company} pays a {position} {salary} a month.
We at {company} hire a {position}. Place: {city}. Pay: {salary}.
{company} in {city} hires a {position} for {salary} a month.
A {position} is wanted in {city}. {company} pays {salary} a month.
Work as a {position} at {company} in {city}! Salary: {salary}.
{company} offers {salary} a month to a {position} in {city}.
City: {city}. Company: {company}. Position: {position}. Salary: {salary}.
We are {company} from {city} and need a {position}. We pay {salary}.
Earn {salary} a month as a {position} with {company}, {city}.
For {city}, {company} seeks a {position} and offers {salary} monthly."""),
    record("country:country language:language currency:currency city/visited_city:city",
           """We went to {country}, where people spoke {language} and took {currency}, and we stayed in {city}.
Travel notes. Country: {country}. City: {city}. Language: {language}. Currency: {currency}.
In {city} I practised my {language}. It was my first time in {country}, and I paid in {currency}.
In {country} we saw {city}. People speak {language} and pay in {currency}.
{city} is where we stayed in {country}. The language was {language}, the currency {currency}.
Our trip to {country} took us to {city}. We spoke {language} and paid with {currency}.
{country}: language {language}, currency {currency}, city visited {city}.
They speak {language} in {country}, use {currency}, and {city} was our favourite.
I flew to {city} in {country} with some {language} and a few {currency}."""),
    record("room:room color/colour:colour length:small width:small",
           """The {room} is {length} metres long and {width} metres wide. Its walls are {color}.
Our {color} {room} measures {length} by {width} metres.
{room}: length {length}, width {width}, color {color}
We painted the {room} {color}. It is {length} by {width} metres.
A {room} of {length} by {width} metres with {color} walls.
The {color} {room} has a length of {length} and a width of {width} metres.
{length} metres long, {width} metres wide: the {color} {room}."""),
]  # fmt: skip


# More texts for the same fields; training only, so that the split of RECORDS stays as it is.
MORE = [
    record("room:room color/colour:colour length:small width:small",
           """Our {room} is {length} metres long, {width} metres wide and {color}.
In the {room} the walls are {color}. It has a length of {length} metres and a width of {width} metres.
The {room} has {color} walls and is {length} by {width} metres.
This {room} is {length} metres in length and {width} metres in width; it is {color}.
My {room} is {color}, {length} metres long and {width} metres wide.
A {color} {room} that is {length} metres long and {width} metres wide.
The old {room} is now {color}. Length: {length}. Width: {width}.
We measured the {room}: {length} metres long, {width} wide. The walls are {color}.
The {room} was painted {color}; it measures {length} by {width}.
One {room}, {color}, {length} x {width} metres."""),
    record("city/place:city temperature/degrees:degrees condition/sky:enum(sunny,rainy,cloudy,windy,foggy,snowy) humidity:percent",
           """We had {condition} weather in {city}, {temperature} degrees and {humidity} percent humidity.
In {city} the {condition} weather goes on with {temperature} degrees and {humidity} percent humidity.
{temperature} degrees and {condition} skies over {city}; humidity {humidity} percent.
The {condition} day in {city} brought {temperature} degrees and {humidity} percent humidity.
At {temperature} degrees, {city} is {condition} with a humidity of {humidity} percent.
{condition} again in {city}. Humidity {humidity} percent, temperature {temperature} degrees.
They measured {temperature} degrees and {humidity} percent humidity in {city}, with {condition} weather."""),
    record("country:country language:language currency:currency city/visited_city:city",
           """We stayed in {city}, a city in {country}. The people there speak {language} and use {currency}.
Our hotel was in {city} in {country}. Language: {language}. Currency: {currency}.
{city} lies in {country}, where the language is {language} and the currency is {currency}.
{city}, {country}: they speak {language} and pay with {currency}.
In {country}, the currency is {currency}, the language is {language}, and we saw {city}.
We love {city}. In {country} you hear {language} and pay in {currency}.
From {city} we saw all of {country}. The currency was {currency}, the language {language}.
{country} was great: {city}, the {language} language, and prices in {currency}."""),
    record("name/contact:full_name email:email phone/phone_number:phone company/employer:company",
           """Hi, this is {name} from {company}. You may write to {email} or phone {phone}.
{name} from {company} can be mailed at {email} or rung at {phone}.
Hello, I am {name} of {company}; just mail {email} or call {phone}.
Please mail {email} or ring {phone} to reach {name} at {company}.
To reach {name} ({company}), mail {email} or dial {phone}.
You could mail {email} and ask for {name} of {company}, or call {phone}.
It is {name} from {company} here. Mail: {email}. Phone: {phone}.
At {company}, {name} answers mails to {email} and calls to {phone}."""),
    record("name/pet/pet_name:name animal/species/kind:enum(cat,dog,rabbit,parrot,hamster,horse,turtle) age:small owner:full_name",
           """The little {animal} {name}, {age} years old, is owned by {owner}.
A {animal}, {name}, {age}, stays with {owner}.
{name} the {animal} is {age} and stays with {owner}.
With {owner} lives the {animal} {name}, {age}.
This {animal}, called {name}, is {age} and belongs to {owner}."""),
    record("title/book:title author/writer:full_name year/published:year pages/num_pages:number",
           """In {year} came "{title}" by {author}, a book with {pages} pages.
The year {year} brought "{title}", {pages} pages, by {author}.
We read the {pages} pages of "{title}" by {author}, published in {year}.
{author} needed {pages} pages for "{title}" in {year}.
"{title}" has {pages} pages. {author} wrote it in {year}."""),
    record("product/item/name:item color/colour:colour price/cost:price stock/quantity:number",
           """There is a {product} in {color} for {price} dollars, and we have {stock}.
Buy the {color} {product}! Only {price} dollars, {stock} in stock.
The {product} is {color}. It costs {price} dollars. There are {stock} left.
We have got {stock} of the {color} {product} for {price} dollars each."""),
    record("origin/from:city destination/to:city date/departure:date passengers/people:small",
           """Travel plan: {origin} to {destination}, {date}, {passengers} people.
Flight: {origin} to {destination} on {date}, {passengers} seats.
Route {origin} to {destination}. {passengers} travellers, {date}.
{origin} to {destination} on {date} for {passengers}.
Booking: {passengers} people, {origin} to {destination}, {date}."""),
    record("name/person:name age:age",
           """All the best, {name}, {age} years old today!
Congratulations {name}, {age} years!
Happy day, {name}! You are {age}.
{name} is turning {age} this week.
Cheers to {name}, now {age}."""),
]  # fmt: skip


class Field(NamedTuple):
    """A field of a composed text: possible keys, kind of value, clauses that follow the subject."""

    keys: list[str]
    kind: str
    says: list[str]


def field(keys: str, kind: str, says: str) -> Field:
    return Field(keys.split(), kind, says.split(" / "))


# Subject -> clauses. A text is a subject with some of its clauses in any order.
PERSON = [
    field(
        "age years age_in_years",
        "age",
        "is {v} years old / is {v} / turned {v} last week / is aged {v} / has just become {v} years old / will not be {v} forever",
    ),
    field(
        "city location hometown place residence",
        "city",
        "lives in {v} / is from {v} / comes from {v} / moved to {v} / grew up in {v} / has a flat in {v} / was born in {v} / stays in {v}",
    ),
    field(
        "job occupation profession work",
        "job",
        "works as a {v} / is a {v} / earns money as a {v} / is employed as a {v} / has been a {v} for years / trained as a {v}",
    ),
    field(
        "email email_address mail",
        "email",
        "can be reached at {v} / uses the address {v} / writes from {v} / has the email {v}",
    ),
    field(
        "phone phone_number telephone",
        "phone",
        "has the phone number {v} / can be called at {v} / answers the phone at {v}",
    ),
    field(
        "company employer firm",
        "company",
        "works for {v} / is employed at {v} / runs {v} / joined {v} / left {v} last year",
    ),
    field(
        "hobby interest free_time",
        "hobby",
        "likes {v} / enjoys {v} / spends weekends on {v} / loves {v} / is fond of {v}",
    ),
    field(
        "food favorite_food dish",
        "food",
        "likes to eat {v} / always orders {v} / cooks {v} every week",
    ),
    field(
        "color favorite_color colour",
        "colour",
        "likes the color {v} / always wears {v} / painted the door {v}",
    ),
    field(
        "language native_language mother_tongue",
        "language",
        "speaks {v} / grew up with {v} / teaches {v}",
    ),
    field(
        "country nationality_country home_country",
        "country",
        "is at home in {v} / has a passport of {v} / travelled through {v}",
    ),
    field(
        "year birth_year since",
        "year",
        "was born in {v} / has been here since {v} / started in {v}",
    ),
    field(
        "pet pet_name dog_name",
        "pet",
        "has a dog called {v} / owns a cat named {v} / walks a dog named {v}",
    ),
    field(
        "children num_children kids",
        "small",
        "has {v} children / raised {v} kids / is a parent of {v}",
    ),
]
THING = [
    field(
        "price cost amount total",
        "price",
        "costs {v} dollars / is sold for {v} dollars / has a price of {v} / is worth {v} dollars / was bought for {v}",
    ),
    field("color colour", "colour", "is {v} / comes in {v} / is painted {v} / has the color {v}"),
    field(
        "quantity stock count available",
        "number",
        "is available {v} times / has {v} left / is in stock with {v} pieces / was counted {v} times",
    ),
    field(
        "weight kilograms mass", "number", "weighs {v} kilograms / has a weight of {v} / weighs {v}"
    ),
    field(
        "brand maker company manufacturer",
        "company",
        "is made by {v} / comes from {v} / was built by {v} / is a product of {v}",
    ),
    field(
        "code sku product_code id",
        "code",
        "has the code {v} / is listed as {v} / carries the number {v} / goes by {v} in our books",
    ),
    field(
        "date delivery_date arrival",
        "date",
        "arrives on {v} / was delivered on {v} / ships on {v} / is expected on {v}",
    ),
    field(
        "city warehouse location origin",
        "city",
        "is stored in {v} / is shipped from {v} / waits in {v} / was made in {v}",
    ),
    field("year built model_year", "year", "was built in {v} / is from {v} / dates from {v}"),
    field(
        "owner buyer customer",
        "full_name",
        "belongs to {v} / was bought by {v} / is owned by {v} / was ordered by {v}",
    ),
    field("rating stars score", "small", "is rated {v} / got {v} points / has a score of {v}"),
]
EVENT = [
    field(
        "date day when",
        "date",
        "is on {v} / takes place on {v} / was moved to {v} / happens on {v}",
    ),
    field(
        "time start_time begin", "clock", "starts at {v} / begins at {v} / opens its doors at {v}"
    ),
    field(
        "city place location venue_city",
        "city",
        "is held in {v} / takes place in {v} / happens in {v} / comes to {v}",
    ),
    field(
        "host organizer speaker",
        "full_name",
        "is hosted by {v} / is led by {v} / features {v} / was planned by {v}",
    ),
    field(
        "guests attendees participants people",
        "number",
        "expects {v} guests / has {v} people on the list / welcomes {v} visitors",
    ),
    field(
        "price ticket_price fee",
        "price",
        "costs {v} dollars / asks {v} dollars for a ticket / has tickets for {v} dollars",
    ),
    field(
        "sponsor company",
        "company",
        "is paid for by {v} / has {v} as sponsor / is supported by {v}",
    ),
    field("room hall", "room", "is in the {v} / uses the {v}"),
    field(
        "duration minutes length",
        "minutes",
        "lasts {v} minutes / takes {v} minutes / is {v} minutes long",
    ),
    field("language spoken_language", "language", "is in {v} / will be held in {v}"),
]
# (key of the subject, its kind, how the subject reads, its clauses)
SUBJECTS = [
    (
        ["name", "person", "full_name", "customer", "employee"],
        "full_name",
        [
            "{v}",
            "{v}",
            "Our colleague {v}",
            "My friend {v}",
            "The person called {v}",
            "Mr or Ms {v}",
        ],
        PERSON,
    ),
    (
        ["name", "first_name", "person"],
        "name",
        ["{v}", "{v}", "My neighbour {v}", "Little {v}", "Someone named {v}"],
        PERSON,
    ),
    (
        ["product", "item", "article", "name"],
        "item",
        ["The {v}", "Our {v}", "This {v}", "One {v}", "A {v}"],
        THING,
    ),
    (
        ["event", "title", "name", "meeting"],
        "title",
        [
            '"{v}"',
            'The event "{v}"',
            'The meeting "{v}"',
            'Our evening "{v}"',
            'The workshop "{v}"',
        ],
        EVENT,
    ),
]
JOINTS = [" and ", ", ", ", and ", ". It also ", "; it "]
PEOPLE_JOINTS = [" and ", ", ", ", and ", ". This person ", "; the same person "]
