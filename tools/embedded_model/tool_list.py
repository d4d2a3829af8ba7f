"""The tools that training conversations offer: names, parameters, and how people ask for them.

A parameter is `name/other_name:kind`, its description after `=`. A sentence names the parameters it
gives by their first name in braces; those it leaves out are optional. `UNSEEN` tools are never trained on.
"""

from typing import NamedTuple


class Tool(NamedTuple):
    names: list[str]
    about: list[str]
    params: list[str]
    asks: list[str]


def tool(names: str, about: str, params: list[str], asks: str) -> Tool:
    return Tool(names.split(), about.split("; "), params, asks.strip().splitlines())


TOOLS = [
    tool("get_weather get_current_weather weather_lookup current_weather fetch_weather",
         "Get the current weather for a city; Get the current weather in a given location; Look up the weather; Current weather conditions",
         ["city/location/place:city=Name of the city", "unit/units:enum(celsius,fahrenheit)=Temperature unit"],
         """What is the weather in {city}?
What's the weather like in {city}?
What's the weather like in {city} today?
How is the weather in {city}?
How's the weather in {city} right now?
Tell me the weather in {city}.
weather in {city}
Is it raining in {city}?
Is it cold in {city} now?
Do I need an umbrella in {city}?
What is the temperature in {city} in {unit}?
How warm is it in {city}, in {unit}?
Weather for {city} please, in {unit}.
Can you check the weather in {city}?
I am going to {city}. What is the weather there?
Give me the weather in {city} in {unit}.
What is it like outside in {city}?
Current weather {city}?
{city}的天气怎么样？
{city}今天天气如何？
Could you tell me the weather in {city}?
How hot is it in {city}?
Is the sun shining in {city}?
{city} weather
{city}: weather?
I need the weather for {city} in {unit}.
What should I wear in {city}? Check the weather.
Look up the weather for {city}, in {unit}.
What are the temperatures in {city}?
Does it snow in {city}?
Let me know the weather of {city} in {unit}.
What does the sky look like in {city}?"""),
    tool("get_current_weather get_weather",
         "Get the current weather in a given location",
         ["location:us_city=The city and state, e.g. San Francisco, CA", "unit:enum(celsius,fahrenheit)=Unit"],
         """What is the weather in {location}?
What's the weather like in {location}?
What's the weather like in {location} today?
How is the weather in {location}?
Tell me the weather in {location} in {unit}.
What is the temperature in {location} in {unit}?
Weather in {location}, please.
Can you check the weather in {location}?
Is it sunny in {location}?"""),
    tool("get_forecast weather_forecast forecast", "Weather forecast for the coming days; Get a forecast",
         ["city/location:city=City", "days/num_days:small=Number of days"],
         """What will the weather be in {city} for the next {days} days?
Give me a {days} day forecast for {city}.
Forecast for {city}, {days} days.
Show the weather forecast of {city} for {days} days.
I need a forecast for {city}.
How will the weather in {city} develop over {days} days?
What is the forecast for {city}?
Weather in {city} over the next {days} days?
How will the weather be in {city} in the coming {days} days?
{days} days of weather for {city}, please.
Predict the weather of {city} for {days} days.
I want the forecast of the next {days} days in {city}."""),
    tool("get_time get_current_time time_in_city local_time current_time", "Get the current time in a city; Tell the local time",
         ["city/location/place:city=City name"],
         """What time is it in {city}?
What's the time in {city} now?
Tell me the current time in {city}.
time in {city}?
How late is it in {city}?
What is the local time in {city}?
Can you tell me what time it is in {city}?
现在{city}几点？
Could you tell me the time in {city}?
{city} time
Which time do they have in {city}?
Is it late in {city}?
What does the clock say in {city}?
I want to call someone in {city}. What time is it there?"""),
    tool("get_time_in_timezone get_time timezone_clock", "Current time in a time zone",
         ["timezone/tz:timezone=IANA time zone"],
         """What time is it in {timezone}?
Tell me the time in the zone {timezone}.
Current time for {timezone}?
Show the clock for {timezone}.
I need the time in {timezone}."""),
    tool("send_email email_send compose_email mail", "Send an email; Send an email to someone",
         ["to/recipient/address:email=Email address", "subject:title=Subject line", "body/message/text:message=Text"],
         """Send an email to {to} with the subject "{subject}" and the text "{body}".
Email {to}: subject "{subject}", body "{body}".
Write to {to} with subject "{subject}" saying "{body}".
Please send a mail to {to}. Subject: {subject}. Text: {body}.
Send {to} an email titled "{subject}" that says "{body}".
Mail {to} the message "{body}" with subject "{subject}".
Send an email to {to} saying "{body}".
Write an email to {to}. The subject is "{subject}" and the text is "{body}".
Compose a mail for {to} with the title "{subject}" and the message "{body}".
I want to email {to} about "{subject}": "{body}".
Mail to {to}, subject "{subject}", text "{body}".
Tell {to} by mail: "{body}".
Send "{body}" to {to}, subject "{subject}"."""),
    tool("send_message send_sms text_message send_text", "Send a text message to a contact; Send an SMS",
         ["recipient/to/contact:name=Name of the contact", "message/text/body:message=The text"],
         """Send a message to {recipient}: {message}
Text {recipient} that {message}.
Tell {recipient} "{message}".
Write {recipient} a message: "{message}".
Message {recipient}: {message}
Send {recipient} the text "{message}".
Please let {recipient} know: {message}
SMS to {recipient}: {message}
Write to {recipient}: {message}
Send {recipient} this: {message}
Inform {recipient}: {message}
Message to {recipient}: "{message}"
Let {recipient} know that {message}.
Drop {recipient} a line: {message}
I want to tell {recipient} "{message}"."""),
    tool("search web_search search_web google_search internet_search", "Search the web; Search the internet for a query",
         ["query/q/search_term:topic=What to look for", "limit/max_results/num_results:small=How many results"],
         """Search for {query}.
Search the web for {query}.
Look up {query} online.
Find information about {query}.
Can you search for {query}?
Find {limit} results about {query}.
Search the internet for {query} and give me {limit} results.
I want to read about {query}. Please search.
web search: {query}
Please look for {query} on the web.
Google {query} for me.
Show me {limit} pages about {query}.
Look up {query}.
I need information about {query}.
What can you find about {query}?
Search: {query}
Find me something about {query}.
Give me {limit} results for {query}.
Look for {query} and show {limit} results.
Do a web search on {query}.
Use the search tool for {query}."""),
    tool("add add_numbers sum_numbers", "Add two numbers; Adds two numbers and returns the sum",
         ["a/x/first:number=First number", "b/y/second:number=Second number"],
         """What is {a} + {b}?
Add {a} and {b}.
What is {a} plus {b}?
Calculate {a} + {b}.
Sum {a} and {b}.
Use the tool to add {a} and {b}."""),
    tool("multiply multiply_numbers product", "Multiply two numbers; Returns the product of two numbers",
         ["a/x/first:number=First factor", "b/y/second:number=Second factor"],
         """What is {a} times {b}?
Multiply {a} by {b}.
What is {a} * {b}?
Calculate {a} x {b}.
Compute the product of {a} and {b}.
Multiply {a} and {b} with the tool."""),
    tool("divide divide_numbers", "Divide one number by another",
         ["a/dividend/x:number=Number to divide", "b/divisor/y:small=Divide by this"],
         """What is {a} divided by {b}?
Divide {a} by {b}.
Compute {a} / {b}.
Calculate {a} over {b}.
How much is {a} / {b}?"""),
    tool("set_timer start_timer timer", "Start a timer; Set a countdown timer",
         ["minutes/duration/duration_minutes:minutes=Minutes"],
         """Set a timer for {minutes} minutes.
Start a {minutes} minute timer.
Timer {minutes} minutes please.
Wake me in {minutes} minutes with a timer.
I need a timer of {minutes} minutes.
Count down {minutes} minutes.
Can you set a {minutes}-minute timer?
Start the timer, {minutes} minutes.
Tell me when {minutes} minutes are over.
Set the timer to {minutes} minutes.
{minutes} minutes timer
Please count {minutes} minutes for me."""),
    tool("set_alarm create_alarm alarm", "Set an alarm clock; Create an alarm",
         ["time/at:clock=Time as HH:MM", "label/name:task=What for", "day:day=Weekday"],
         """Set an alarm for {time}.
Wake me up at {time}.
Set an alarm at {time} on {day}.
I need an alarm at {time} to {label}.
Alarm for {time} please.
Set an alarm for {day} at {time}.
Please wake me at {time} on {day}.
Alarm on {day} at {time}.
I have to get up at {time}.
Put an alarm at {time}.
Let it ring at {time} on {day}.
Get me up at {time} on {day}."""),
    tool("create_reminder add_reminder set_reminder remind_me", "Create a reminder; Add a reminder for the user",
         ["text/title/task:task=What to remember", "date/day:date=Date", "time:clock=Time"],
         """Remind me to {text}.
Remind me to {text} at {time}.
Remind me on {date} to {text}.
Set a reminder to {text} on {date} at {time}.
I must not forget to {text}. Remind me at {time}.
Please remind me to {text} on {date}.
Create a reminder: {text}, {date}.
Reminder: {text}
Do not let me forget to {text}.
On {date} I have to {text}. Remind me.
Set up a reminder for {date} to {text}.
Remind me at {time} on {date} to {text}.
I need a reminder to {text}."""),
    tool("add_todo create_task add_task todo_add", "Add a task to the to-do list",
         ["task/title/text:task=The task", "priority:enum(low,medium,high)=Priority"],
         """Add "{task}" to my to-do list.
Put {task} on my list.
New task: {task}.
Add a {priority} priority task: {task}.
Create a task to {task} with {priority} priority.
I have to {task}. Add it to my tasks.
Todo: {task}, priority {priority}."""),
    tool("create_event add_event schedule_meeting calendar_add", "Create a calendar event; Add an event to the calendar",
         ["title/name/summary:title=Title", "date/day:date=Date as YYYY-MM-DD", "time/start:clock=Start time", "person/attendee:name=Who comes"],
         """Create an event "{title}" on {date} at {time}.
Put "{title}" in my calendar on {date}.
Schedule "{title}" with {person} on {date} at {time}.
Add a meeting with {person} on {date} at {time} called "{title}".
Plan "{title}" for {date}, {time}.
Please add "{title}" on {date} at {time} to the calendar.
Add the event "{title}" on {date}.
New event: "{title}", {date}, {time}.
I meet {person} on {date} at {time} for "{title}".
Enter "{title}" into my calendar for {date} at {time}.
Set up "{title}" with {person} on {date}."""),
    tool("book_flight search_flights find_flights flight_search", "Find flights between two cities; Search for flights",
         ["origin/from_city/departure:city=From", "destination/to_city/arrival:city=To", "date/departure_date:date=Date", "passengers/num_passengers:small=Passengers"],
         """Find a flight from {origin} to {destination} on {date}.
I want to fly from {origin} to {destination}.
Flights from {origin} to {destination} on {date} for {passengers} people.
Search flights {origin} to {destination}, {date}.
Are there flights from {origin} to {destination}?
Book me a flight from {origin} to {destination} on {date}.
I need to get from {origin} to {destination} by plane on {date}.
We are {passengers} people and want to fly from {origin} to {destination} on {date}.
Fly me from {origin} to {destination} on {date}.
Which flights go from {origin} to {destination}?
A flight to {destination} from {origin} on {date}, please.
I am in {origin} and need to be in {destination} on {date}.
Look for flights from {origin} to {destination} for {passengers} passengers.
How can I fly from {origin} to {destination} on {date}?
Plane tickets {origin} - {destination} for {passengers}."""),
    tool("book_hotel find_hotel hotel_search search_hotels", "Find a hotel room; Search hotels in a city",
         ["city/location:city=City", "nights/num_nights:small=Nights", "guests/people:small=Guests", "check_in/date:date=Arrival"],
         """Find a hotel in {city} for {nights} nights.
I need a hotel in {city} for {guests} guests.
Book a room in {city} from {check_in} for {nights} nights.
Hotels in {city} please.
Look for a hotel in {city} on {check_in}.
Find a place to stay in {city} for {nights} nights and {guests} guests.
I need a hotel in {city}.
Get a room for {guests} guests in {city}.
We stay {nights} nights in {city}. Find a hotel.
Reserve a hotel in {city} for {guests} people from {check_in}.
Where can {guests} people sleep in {city}?
Search a hotel in {city} for {nights} nights from {check_in}.
{nights} nights in {city}, please."""),
    tool("find_restaurant restaurant_search search_restaurants", "Find restaurants; Search for places to eat",
         ["city/location:city=City", "cuisine/food_type:cuisine=Kind of food"],
         """Find a {cuisine} restaurant in {city}.
Where can I eat {cuisine} food in {city}?
I am hungry. Find {cuisine} food in {city}.
Show me restaurants in {city}.
Is there a good {cuisine} restaurant in {city}?
Recommend a {cuisine} place in {city}.
Look for {cuisine} restaurants in {city}.
I would like {cuisine} food in {city}.
Where is a {cuisine} restaurant in {city}?
We want to eat in {city}.
Get me a {cuisine} dinner in {city}."""),
    tool("reserve_table book_table make_reservation", "Reserve a table in a restaurant",
         ["restaurant/name:company=Restaurant", "people/party_size/guests:small=How many people", "time:clock=Time", "date:date=Date"],
         """Reserve a table for {people} at {restaurant} at {time}.
Book a table at {restaurant} for {people} people on {date} at {time}.
I want to eat at {restaurant} on {date}. Table for {people}.
Make a reservation for {people} at {restaurant}, {date} {time}.
Table for {people} at {restaurant} on {date} please.
We are {people} people and want to eat at {restaurant} at {time}.
Can you book {restaurant} for {people} on {date}?
Get us a table at {restaurant} for {people}, {time}.
At {restaurant}, reserve for {people} people at {time} on {date}.
Please reserve {restaurant} on {date} at {time} for {people}."""),
    tool("translate translate_text translator", "Translate text into another language; Translate a text",
         ["text/phrase/sentence:phrase=Text", "target_language/language/to:language=Target language"],
         """Translate "{text}" into {target_language}.
How do you say "{text}" in {target_language}?
Translate to {target_language}: {text}
What is "{text}" in {target_language}?
Please translate "{text}" to {target_language}.
I need "{text}" in {target_language}.
Say "{text}" in {target_language}.
Into {target_language}: {text}
What is the {target_language} for "{text}"?
"{text}" in {target_language}, please.
Give me the {target_language} translation of "{text}".
How would you say "{text}" in {target_language}?
I want to say "{text}" in {target_language}."""),
    tool("convert_currency currency_convert exchange_money", "Convert an amount from one currency to another",
         ["amount:big=Amount", "from_currency/source/from:currency=From", "to_currency/target/to:currency=To"],
         """Convert {amount} {from_currency} to {to_currency}.
How much is {amount} {from_currency} in {to_currency}?
What are {amount} {from_currency} worth in {to_currency}?
Change {amount} {from_currency} into {to_currency}.
I have {amount} {from_currency}. How many {to_currency} is that?
{amount} {from_currency} in {to_currency}?
Exchange {amount} {from_currency} for {to_currency}.
What is {amount} {from_currency} in {to_currency}?
Turn {amount} {from_currency} into {to_currency}.
How many {to_currency} do I get for {amount} {from_currency}?
Convert to {to_currency}: {amount} {from_currency}"""),
    tool("get_exchange_rate exchange_rate", "Get the exchange rate between two currencies",
         ["base/from_currency:currency=Base currency", "target/to_currency:currency=Target currency"],
         """What is the exchange rate from {base} to {target}?
Exchange rate {base} {target}?
How does {base} trade against {target}?
Give me the rate of {base} to {target}.
Tell me the {base} to {target} rate."""),
    tool("get_stock_price stock_price stock_quote", "Get the price of a stock; Current stock price by symbol",
         ["symbol/ticker:stock=Ticker symbol"],
         """What is the stock price of {symbol}?
How much is {symbol} trading at?
Price of {symbol} please.
Give me a quote for {symbol}.
What does one share of {symbol} cost?
Check the {symbol} stock.
Stock {symbol}?
How is {symbol} doing?
What is {symbol} worth?
I want the price of the stock {symbol}.
Show me the {symbol} price."""),
    tool("turn_on_light switch_light set_light light_control", "Control the lights in a room",
         ["room/location:room=Room", "state/action:enum(on,off)=On or off", "brightness/level:percent=Percent"],
         """Turn {state} the light in the {room}.
Switch the {room} light {state}.
Turn the lights {state} in the {room}.
Please turn {state} the {room} lights.
Set the {room} light {state} at {brightness} percent.
Lights {state} in the {room}, please.
Light {state} in the {room}!
Put the {room} light {state}.
Make the {room} lights go {state}.
{room} light {state}
Switch {state} the lamp in the {room}.
I want the {room} lights {state}."""),
    tool("set_temperature set_thermostat heat_room", "Set the temperature of a room",
         ["temperature/degrees/target:degrees=Degrees", "room/zone:room=Room"],
         """Set the {room} to {temperature} degrees.
Make the {room} {temperature} degrees warm.
Set the thermostat to {temperature} degrees.
Heat the {room} to {temperature}.
I want {temperature} degrees in the {room}.
Change the temperature in the {room} to {temperature} degrees.
{temperature} degrees in the {room}, please.
Change the {room} temperature to {temperature}.
Set {temperature} degrees for the {room}.
The {room} should have {temperature} degrees.
Let the {room} be {temperature} degrees."""),
    tool("play_music play_song start_music", "Play music; Play music of a genre or an artist",
         ["genre/style:genre=Genre", "artist/singer:full_name=Artist", "volume:percent=Volume"],
         """Play some {genre} music.
Play {genre}.
I want to hear {artist}.
Play music by {artist}.
Put on some {genre} at volume {volume}.
Can you play {artist} at volume {volume}?
Let me listen to {genre} music.
Start some {genre} music.
Music by {artist}, please.
I feel like {genre}.
Let me hear {genre} at volume {volume}.
Can I hear {artist}?
Turn on {genre} music.
{genre} music please
Give me some {genre} by {artist}."""),
    tool("get_news news_search latest_news", "Get news about a topic",
         ["topic/subject/query:topic=Topic", "count/limit:small=Number of articles"],
         """What is the news about {topic}?
Show me the latest news on {topic}.
Give me {count} news articles about {topic}.
Any news about {topic}?
I want {count} headlines on {topic}.
Read me the news on {topic}.
News about {topic}?
What happened with {topic}?
Get me {count} articles on {topic}.
Tell me the news on {topic}.
Latest on {topic}"""),
    tool("order_food place_order order_meal", "Order food",
         ["dish/item/food:food=What to order", "quantity/count:small=How many", "address/city:city=Where to"],
         """Order {quantity} portions of {dish}.
I want to order {dish}.
Please order {quantity} times {dish} to {address}.
Get me {dish}, {quantity} portions.
Order {dish} for delivery to {address}.
I would like {quantity} portions of {dish}.
Bring {quantity} {dish} to {address}.
{quantity} times {dish}, please.
Order {dish} for me.
We want {quantity} portions of {dish} in {address}.
Deliver {dish} to {address}."""),
    tool("get_user find_user lookup_user get_contact find_contact", "Look up a user; Find a contact by name",
         ["name/user_name/query:full_name=Full name"],
         """Who is the user {name}?
Find the contact {name}.
Look up {name} in my contacts.
Show me the details of {name}.
Get the user {name}.
What is the phone number of {name}?
Do I know {name}?
Open the contact {name}.
I need the data of {name}.
Search for the user {name}.
What do we have on {name}?"""),
    tool("get_order_status track_order order_status", "Get the status of an order",
         ["order_id/id/order_number:code=Order number"],
         """Where is my order {order_id}?
What is the status of order {order_id}?
Track order {order_id}.
Has order {order_id} been shipped?
Check the order {order_id} please.
My order number is {order_id}. When does it come?
Order {order_id}: where is it?
What about order {order_id}?
Tell me the status of {order_id}.
Is {order_id} on the way?
I wait for order {order_id}."""),
    tool("read_file open_file load_file", "Read a file from disk", ["path/filename/file:url=Where the file is"],
         """Open {path}.
Read the file at {path}.
Show me what is in {path}.
Load {path}.
What does {path} contain?
Get the contents of {path}.
Show {path} to me.
I want to see the file {path}.
What is inside {path}?
Load the file {path} please.
What is written in {path}?"""),
    tool("get_population population country_population", "Get the population of a country or city",
         ["place/country/location:country=Country"],
         """How many people live in {place}?
What is the population of {place}?
Population of {place}?
How big is the population of {place}?
Tell me how many people {place} has."""),
    tool("get_distance distance_between route_distance", "Distance between two cities",
         ["origin/start/from_city:city=Start", "destination/end/to_city:city=End"],
         """How far is it from {origin} to {destination}?
What is the distance between {origin} and {destination}?
Distance {origin} to {destination}?
How many kilometres are there between {origin} and {destination}?
Tell me how far {origin} is from {destination}.
How long is the way from {origin} to {destination}?
{origin} to {destination}: how far?
Is it far from {origin} to {destination}?
Measure the distance from {origin} to {destination}.
How many miles from {origin} to {destination}?"""),
    tool("get_directions directions navigate plan_route", "Get directions between two places",
         ["origin/start:city=Start", "destination/end:city=Goal", "mode/by:enum(car,train,bus,bike)=Means of travel"],
         """How do I get from {origin} to {destination} by {mode}?
Directions from {origin} to {destination}.
Navigate from {origin} to {destination} by {mode}.
Show me the way from {origin} to {destination}.
Plan a route by {mode} from {origin} to {destination}."""),
    tool("add_contact create_contact save_contact", "Save a new contact",
         ["name/full_name:full_name=Name", "phone/phone_number:phone=Phone number", "email:email=Email"],
         """Save {name} with the number {phone}.
Add {name} to my contacts, phone {phone}.
New contact: {name}, {email}.
Create a contact for {name} with phone {phone} and email {email}.
Please save the contact {name}, email {email}.
Store the phone number {phone} for {name}.
Put {name} into my contacts: {phone}, {email}.
{name} has the email {email}. Save it.
Contact {name}, phone {phone}, please save."""),
    tool("roll_dice dice", "Roll dice", ["count/num_dice:small=How many dice"],
         """Roll {count} dice.
Throw {count} dice for me.
Please roll {count} dice.
Give me a roll of {count} dice."""),
    tool("search_products product_search find_product", "Search the shop for products",
         ["query/product/keyword:item=Product", "max_price/price_limit:number=Highest price", "color/colour:colour=Colour"],
         """Find a {query} under {max_price} dollars.
I am looking for a {color} {query}.
Show me a {query}.
Search the shop for a {query} for at most {max_price} dollars.
Do you have a {query} in {color}?
I want to buy a {color} {query} for less than {max_price}.
I want a {query}.
Look for a {query} in {color}.
Which {query} costs less than {max_price} dollars?
I need a {color} {query}.
Show me {color} ones: {query}.
Is there a {query} for under {max_price} dollars?"""),
    tool("add_to_cart cart_add", "Put a product into the shopping cart",
         ["product/item:item=Product", "quantity/amount:small=How many"],
         """Put {quantity} of the {product} in my cart.
Add a {product} to the cart.
I take {quantity} of the {product}, put them in my cart.
Add {quantity} times {product} to my shopping cart.
I want to buy {quantity} of the {product}.
Cart: {quantity} x {product}
Please put the {product} in my cart.
Add the {product} to my cart, {quantity} of them.
{quantity} pieces of the {product} into the cart, please."""),
    tool("get_horoscope horoscope", "Get a horoscope", ["sign:enum(Aries,Taurus,Gemini,Cancer,Leo,Virgo,Libra,Pisces)=Star sign"],
         """What is the horoscope for {sign}?
Read me the {sign} horoscope.
Horoscope of {sign} please.
I am a {sign}. What do the stars say?"""),
    tool("create_user add_user register_user", "Create a user account",
         ["username/name:name=Name", "email:email=Email", "age:age=Age in years", "role:enum(admin,editor,viewer)=Role"],
         """Create a user {username} with email {email}.
Register {username}, age {age}, email {email}.
Add a user named {username} with the role {role}.
New user: {username}, {email}, role {role}.
Make an account for {username} who is {age} years old.
Sign up {username} with the email {email}.
Create the account {username}, {email}.
Please register the user {username}, {age} years old.
{username} needs an account with the role {role}.
Set up a user for {username} with email {email} and role {role}."""),
    tool("run_query execute_sql count_rows", "Count the rows of a table", ["table/table_name:noun=Table"],
         """How many rows are in the table {table}?
Count the rows of {table}.
Count everything in the {table} table.
Give me the row count of {table}.
How big is the table {table}?
Tell me the number of rows in {table}.
The table {table}: how many rows?
How many entries does {table} have?
I need a count of the rows in the {table} table.
Please count what is in the {table} table."""),
]  # fmt: skip

UNSEEN = [
    tool("define_word dictionary_lookup", "Look up the meaning of a word", ["word:noun=The word"],
         """What does the word {word} mean?
Define {word}.
Look up the meaning of {word}."""),
    tool("cancel_booking cancel_reservation", "Cancel a booking by its number", ["booking_id:code=Booking number"],
         """Cancel my booking {booking_id}.
Please cancel the booking with the number {booking_id}."""),
    tool("rent_bike rent_scooter", "Rent a bike in a city", ["city:city=City", "hours:small=Hours"],
         """Rent a bike in {city} for {hours} hours.
I would like to rent a bike in {city} for {hours} hours."""),
    tool("paint_wall", "Paint the walls of a room", ["room:room=Room", "color:colour=Paint colour"],
         """Paint the walls of the {room} {color}.
I want the {room} painted in {color}."""),
    tool("hire_person", "Hire a person for a job", ["person:full_name=Who", "position:job=Job", "salary:big=Monthly pay"],
         """Hire {person} as a {position} for {salary} a month.
Hire {person} as a {position}."""),
    tool("invite_guest send_invitation", "Invite a guest to a party", ["guest:name=Guest", "date:date=Date"],
         """Invite {guest} to the party on {date}.
Send {guest} an invitation for {date}."""),
]  # fmt: skip

VERBS = """create update delete find start stop open close move check set lock unlock rename copy archive print scan
restart pause resume share publish approve reject assign order cancel rent paint clean repair inspect deliver pack
weigh measure sort count label mix launch dock charge ship test train tune upload download export import merge""".split()
THINGS = """order invoice playlist ticket device room garden robot drone printer camera window door document folder
project team report account profile coupon product parcel truck shelf machine sensor battery pump valve recipe menu
lesson course exam game score player match tournament song album photo video slide note page chapter book board card
deck server database table backup cluster queue job pipeline model dataset chart map route trip ship train bus seat
locker badge key""".split()
VERB_WORDS = {
    "create": ["create", "make", "set up", "add"], "delete": ["delete", "remove", "erase"], "find": ["find", "look for", "search"],
    "start": ["start", "launch", "begin"], "stop": ["stop", "end", "halt"], "check": ["check", "look at"], "set": ["set", "adjust"],
    "order": ["order", "buy"], "share": ["share", "send"], "update": ["update", "change", "edit"], "repair": ["repair", "fix"],
    "deliver": ["deliver", "bring"], "cancel": ["cancel", "call off"], "clean": ["clean", "tidy"], "assign": ["assign", "give"],
}  # fmt: skip
ASPECTS = "status price owner location history size version color schedule balance score weight rating duration details count".split()


class Extra(NamedTuple):
    """A parameter of a made-up tool: its possible names, its kind, how sentences give it ({k} name, {v} value)."""

    names: list[str]
    kind: str
    says: list[str]


def extra(names: str, kind: str, says: str) -> Extra:
    return Extra(names.split(), kind, [*says.split(" / "), "{k} {v}", "{k} {v}", "{k}: {v}"])


EXTRAS = [
    extra("priority urgency", "enum(low,medium,high,urgent)", "{v} priority / with {v} priority"),
    extra("quantity count number_of_items amount pieces", "small", "{v} pieces / {v} of them / {v} times"),
    extra("count total number max_count", "number", "{v} in total / up to {v}"),
    extra("color colour paint_color", "colour", "in {v} / colored {v} / in the color {v}"),
    extra("owner user customer client person name", "name", "for {v} / owned by {v} / that belongs to {v}"),
    extra("assignee worker employee contact responsible", "full_name", "assigned to {v} / done by {v} / with {v}"),
    extra("size format_size", "enum(small,medium,large)", "in size {v} / of {v} size"),
    extra("title subject headline label", "title", 'titled "{v}" / called "{v}" / with the title "{v}"'),
    extra("name item_name nickname", "noun", 'named {v} / called {v} / with the name {v}'),
    extra("date day due_date deadline start_date", "date", "on {v} / by {v} / for {v}"),
    extra("time start_time at hour", "clock", "at {v} / starting at {v}"),
    extra("city location place town", "city", "in {v} / near {v} / from {v}"),
    extra("destination target_city to", "city", "to {v} / going to {v}"),
    extra("language lang", "language", "in {v} / in the language {v}"),
    extra("format file_type output", "enum(pdf,csv,json,png)", "as {v} / in {v} format"),
    extra("speed percent brightness volume", "percent", "at {v} percent / set to {v} percent"),
    extra("level floor grade step", "small", "on level {v} / up to level {v}"),
    extra("price cost budget fee", "price", "for {v} dollars / at {v} dollars"),
    extra("salary pay payment monthly_cost", "big", "for {v} a month / paying {v}"),
    extra("year", "year", "from {v} / of the year {v}"),
    extra("email address mail_address", "email", "for {v} / sent to {v} / using {v}"),
    extra("phone phone_number", "phone", "with the number {v} / phone {v}"),
    extra("status state", "enum(open,closed,pending,done)", "that is {v} / marked {v}"),
    extra("mode setting", "enum(auto,manual,eco,fast)", "in {v} mode / using {v} mode"),
    extra("note message text comment", "message", 'with the note "{v}" / saying "{v}" / and write "{v}"'),
    extra("code id number reference", "code", "with the number {v} / number {v} / {v}"),
    extra("minutes duration length", "minutes", "for {v} minutes / {v} minutes long"),
    extra("hours num_hours", "small", "for {v} hours / {v} hours"),
    extra("days num_days", "small", "for {v} days / over {v} days"),
    extra("company vendor firm supplier", "company", "from {v} / by {v} / with the firm {v}"),
    extra("weight kilograms", "number", "weighing {v} / of {v} kilograms"),
    extra("limit max_results", "small", "at most {v} / no more than {v}"),
    extra("room area zone", "room", "in the {v} / for the {v}"),
    extra("topic query keyword", "topic", "about {v} / on {v}"),
    extra("job role position profession", "job", "as a {v} / for a {v}"),
    extra("food dish meal", "food", "with {v} / made of {v}"),
    extra("item product object thing", "item", "with the {v} / using the {v}"),
    extra("task todo action", "task", "to {v}"),
    extra("genre style", "genre", "in {v} style / of {v}"),
    extra("country", "country", "in {v} / from {v}"),
    extra("currency", "currency", "in {v} / paid in {v}"),
    extra("word term", "noun", 'with the word {v} / the word "{v}"'),
]  # fmt: skip
