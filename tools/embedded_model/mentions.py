"""Ways in which a text mentions a value of a kind, so that the edges of values are learned from many contexts.

Kind -> (keys a schema may use, fragments with the value at their start, in the middle or at their end).
"""

_TEXTS: dict[str, tuple[list[str], str]] = {
    "full_name": (
        "name full_name person contact customer client author owner guest employee patient member sender".split(),
        """my name is {v}
I am {v}
I'm {v} and I write to you about this
this is {v} speaking
meet {v}!
we met {v} yesterday
{v} told us so
{v} called again this morning
please ask {v} about it
according to {v}, all is well
the person in charge is {v}
signed by {v}
yours, {v}
name: {v}
it was {v} who did it
{v} lives there with two friends
{v} works with us
dear {v}, thank you
our new colleague is {v}
a letter from {v} came in
thanks go to {v} for the help
{v} asked for a call
{v} here
they know {v} well
the contact is {v}, as always
{v} wants to hear from you
{v} paid at once
the form was filled in by {v} last night
Mr {v} was there
Ms {v} left early
appointment for {v}
registered: {v}""",
    ),
    "city": (
        "city place location town hometown venue residence".split(),
        """in {v}
from {v}
near {v}
the place is {v}
place: {v}
city: {v}
it happened in {v} last week
{v} is home
calls {v} home
the doors in {v} open soon
over in {v} people talk about it
somewhere in {v}
greetings from {v}!
the office in {v} is closed
now lives in {v} with a cat
moved to {v} in spring
born in {v}
{v} was cold that day
we stayed in {v} and liked it
{v} calling
they left {v} at night
at a hotel in {v}
who knows {v} well
a suburb of {v}
located in {v}
back in {v}
{v}, as you know
when in {v}, call us""",
    ),
    "date": (
        "date day when due_date deadline start_date".split(),
        """on {v}
dated {v}
date: {v}
by {v} at the latest
it was {v}
{v} is the day
since {v}
on {v} we met
the deadline is {v}
from {v} on
planned for {v}
see you on {v}
{v} works for all of us
the {v} one
moved to {v} because of rain
not before {v}
as of {v}
the letter of {v} says so
scheduled for {v} now
until {v}""",
    ),
    "clock": (
        "time start_time hour begin at".split(),
        """at {v}
starts at {v}
time: {v}
around {v}
the clock said {v}
{v} sharp
doors open at {v} today
at {v} we begin
from {v} on
the {v} train
be there at {v} please
{v} is fine for us
before {v}
until {v} at most
set for {v}
it was {v} when they came""",
    ),
    "age": (
        "age years age_in_years".split(),
        """is {v} years old
aged {v}
age: {v}
at {v}
turned {v}
{v} years of age
only {v}
a {v} year old
now {v}
who is {v}
will be {v} soon
at the age of {v}
just became {v} years old
{v} already
old for {v}
not yet older than {v}""",
    ),
    "small": (
        "quantity count amount people passengers guests number_of_items pieces".split(),
        """{v} pieces
{v} of them
quantity: {v}
{v} people
there are {v} of us
for {v} persons
{v} in all
a party of {v}
{v} times
we are {v}
with {v} guests
{v} units were sold
group of {v} people
{v} tickets please
count: {v}
{v} came""",
    ),
    "number": (
        "number total count stock pages size".split(),
        """{v} in total
a total of {v}
number: {v}
we counted {v}
{v} left
it has {v} pages
{v} pages long
up to {v}
all {v} are here
{v} in stock
about {v} of these
{v} were found
no fewer than {v}""",
    ),
    "price": (
        "price cost total amount fee sum".split(),
        """for {v} dollars
costs {v} dollars
price: {v}
at a price of {v}
{v} dollars each
comes to {v}
paid {v} dollars
total {v}
the bill was {v}
worth {v} dollars
{v} dollars in all
we owe {v} dollars for it
at {v} a piece
sold for {v} yesterday
a fee of {v} dollars is due""",
    ),
    "big": (
        "salary pay wage income monthly_pay".split(),
        """earns {v} a month
pay: {v}
the salary is {v}
pays {v} per month
for {v} a month
with a salary of {v}
{v} monthly
gets {v} each month
we offer {v} a month
{v} is the pay
income of {v}""",
    ),
    "email": (
        "email email_address mail address".split(),
        """mail me at {v}
you may mail {v} any time
just mail {v}
we mail {v} each day
or mail {v} if you can
drop a mail to {v}
write to {v}
email: {v}
{v}
my address is {v}
send it to {v} please
reach me under {v}
at {v} or by phone
the email {v} works too
{v} is my mail
via {v}
contact: {v}
please use {v} for questions
an email from {v} arrived
by mail ({v})""",
    ),
    "phone": (
        "phone phone_number telephone tel".split(),
        """call {v}
or ring {v}
you may ring {v}
phone: {v}
or call {v}
tel. {v}
my number is {v}
at {v}
reach us by phone at {v} all day
{v} is the number
dial {v} for help
by phone ({v})
the line {v} is free
ring {v} after lunch""",
    ),
    "company": (
        "company employer firm business client organization".split(),
        """works for {v}
I work for {v}
we at {v} say hello
company: {v}
at {v}
from {v}
{v} is hiring
{v} sent the bill
a client of {v}
the firm {v} was there
on behalf of {v}
{v} made it
to {v} in full
{v} paid for it
the team of {v} won
we at {v} hire people
{v} owes us money
runs {v} with a friend
thanks to {v}, it worked
bought from {v} last year""",
    ),
    "job": (
        "job occupation profession role position work".split(),
        """works as a {v}
a {v}
the {v}
job: {v}
is a {v} by trade
this {v} is good
earns a living as a {v}
the {v} of the house
hired as a {v}
wants to be a {v} some day
a {v} named so
looking for a {v} now
the old {v} smiled
one {v} is enough
we need a {v} soon
a trained {v} who likes it""",
    ),
    "item": (
        "product item article object thing".split(),
        """the {v}
a {v}
product: {v}
one {v} please
the {v} broke
our best {v}
we sold the {v} to them
this {v} is new
for the {v} we got thanks
a new {v} arrived
the {v} is on the table
pieces of the {v} were sold
bought a {v} and went home
units of the {v} at once
sent the {v} back""",
    ),
    "room": (
        "room area room_name".split(),
        """in the {v}
the {v} is cold
room: {v}
the {v} is long and wide
our {v} looks new
the {v} has no window
they met in the {v} at night
a big {v}
from the {v} came a noise
the walls of the {v} are old
the {v} is four metres wide""",
    ),
    "enum(sunny,rainy,cloudy,windy,foggy,snowy)": (
        "condition sky weather".split(),
        """{v} weather
it is {v}
a {v} day
the sky is {v}
{v} again
with {v} weather all week
it was {v} outside
{v} skies
the {v} morning was long
weather: {v}""",
    ),
    "colour": (
        "color colour paint".split(),
        """in {v}
is {v}
color: {v}
painted {v}
the {v} one
{v} like the door
it looks {v}
came in {v} this time
all in {v}
{v} walls
wears {v} on Sundays
of {v} color""",
    ),
    "title": (
        "title event book name headline".split(),
        """"{v}"
called "{v}"
the event "{v}"
title: "{v}"
"{v}" was great
we read "{v}" together
for "{v}"
a talk about "{v}" followed
welcome to "{v}"!
under the title "{v}" it ran
join us for "{v}"
the book "{v}" is long
"{v}" starts soon""",
    ),
    "code": (
        "code id number invoice_number order_id reference".split(),
        """number {v}
code: {v}
order {v}
invoice {v} is open
the bill {v} came
with the code {v}
listed as {v}
reference {v}, please
see {v}
under {v} in our books
on invoice {v} we wait
id {v}
ticket {v} is done
we sent {v} today""",
    ),
    "country": (
        "country nation state".split(),
        """in {v}
from {v}
country: {v}
went to {v}
{v} was new to us
flew to {v}, where people were kind
back from {v}
a trip through {v}
the flag of {v}
{v} is far away
at home in {v} now""",
    ),
    "language": (
        "language lang spoken_language".split(),
        """speaks {v}
in {v}
language: {v}
people spoke {v} and smiled
learns {v}
practised {v} there
{v} is spoken
talks {v} at home
wrote it in {v} first
knows some {v}""",
    ),
    "currency": (
        "currency money".split(),
        """in {v}
paid in {v}
currency: {v}
took {v} only
pays with {v} here
they took {v}, and that was that
changed it to {v}
prices are in {v} there""",
    ),
    "food": (
        "food dish meal".split(),
        """likes {v}
ate {v}
we had {v} for lunch
dish: {v}
a plate of {v} came
{v} tastes best
ordered {v} again
cooks {v} on Fridays
with {v}
{v} for all""",
    ),
    "hobby": (
        "hobby interest pastime".split(),
        """likes {v}
enjoys {v}
hobby: {v}
loves {v} most of all
spends the weekend on {v}
fond of {v}
{v} is the hobby
is into {v} lately""",
    ),
    "year": (
        "year since founded published".split(),
        """in {v}
since {v}
year: {v}
the year {v}
came out in {v}
in {v} it began
{v} was a good year
from {v}
built in {v} by hand
as early as {v}""",
    ),
    "minutes": (
        "duration minutes length".split(),
        """{v} minutes
lasts {v} minutes
for {v} minutes
takes {v} minutes in all
{v} minutes long
after {v} minutes it ends
duration: {v} minutes""",
    ),
    "degrees": (
        "temperature degrees temp".split(),
        """{v} degrees
it is {v} degrees
at {v} degrees
temperature: {v}
{v} degrees warm
heated to {v} degrees
with {v} degrees today""",
    ),
}

MENTIONS = {kind: (keys, forms.splitlines()) for kind, (keys, forms) in _TEXTS.items()}
