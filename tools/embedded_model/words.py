"""Word lists that the generators draw from. Typed in by hand; no list comes from a data set."""

NAMES = """Anna Ben Clara David Elena Felix Grace Hugo Irene Jonas Karin Leo Maria Nadia Oscar Paula Quentin
Rosa Simon Tara Umar Vera Walter Xenia Yusuf Zoe Alice Bob Carol Dan Eve Frank Gina Henry Ivan Julia Kevin Laura
Mike Nora Oliver Peter Rachel Sam Tom Ursula Victor Wendy Ali Aisha Amara Amir Ana Andre Anita Antonio Arjun Asha
Astrid Aya Beatriz Bruno Camila Carlos Chen Chloe Dalia Daniel Deepa Diego Dmitri Emeka Emily Emma Erik Esther
Fatima Fiona Gabriel Giulia Hana Haruto Hassan Helen Ibrahim Ingrid Isabel Jack Jamal James Jane Javier Jin John
Jorge Joseph Kaito Kamal Kate Kenji Kofi Lars Layla Lena Liam Lin Linda Lucas Lucia Luis Magnus Mahmoud Mario Mark
Marta Mary Mateo Mei Mia Miguel Mina Mohamed Naomi Natalia Nikhil Nina Noah Olga Omar Pablo Patrick Paul Pedro
Petra Priya Rafael Rahul Ravi Rebecca Ricardo Robert Ruth Salma Samir Sandra Sara Sarah Sofia Sophie Stefan Susan
Sven Tanya Thomas Tim Tomas Viktor Wei William Yara Yuki Zainab Zara Zuri Abena Adaeze Bashir Boris Cecilia Darius
Edith Farah Goran Hiroshi Ines Jasmine Keiko Lorenzo Mirela Nasser Olivia Pavel Rania Selma Tariq Valeria Wanda
Yolanda Zoltan Milan Tessa Edgar Freya Gustav Heidi Igor Judith Klara Ludwig Marcel Nils Otto Pierre Rolf Silvia
Theo Uma Vikram Winston Yasmin Agnes Bianca Cyrus Dora Elias Flora""".split()

SURNAMES = """Smith Jones Miller Garcia Chen Wang Kim Park Singh Patel Khan Ahmed Silva Santos Costa Rossi Weber
Fischer Novak Kowalski Ivanov Petrov Hansen Larsen Berg Lindqvist Dubois Laurent Moreau Tanaka Sato Suzuki Okafor
Mensah Diallo Haddad Nasser Cohen Levy Brown Taylor Wilson Clark Lewis Walker Young King Wright Hill Green Baker
Adams Nelson Carter Mitchell Turner Parker Evans Collins Reyes Cruz Ortiz Ramos Vega Castro Ruiz Molina Herrera
Stone Fox Marsh Frost Lane Brooks Wood Ford Grant Hunt Price Ross Murray Byrne Walsh Quinn Farrell""".split()

CITIES = """Paris|London|Berlin|Tokyo|Madrid|Rome|Lisbon|Vienna|Oslo|Cairo|Lima|Delhi|Beijing|Seoul|Moscow|Dublin
Athens|Prague|Warsaw|Budapest|Stockholm|Helsinki|Copenhagen|Amsterdam|Brussels|Bern|Zurich|Geneva|Milan|Naples
Venice|Florence|Turin|Barcelona|Valencia|Seville|Porto|Lyon|Marseille|Nice|Bordeaux|Hamburg|Munich|Cologne
Frankfurt|Leipzig|Dresden|Krakow|Gdansk|Istanbul|Ankara|Izmir|Dubai|Doha|Riyadh|Tehran|Baghdad|Beirut|Amman
Nairobi|Lagos|Accra|Dakar|Casablanca|Tunis|Kampala|Durban|Cape Town|Johannesburg|Mumbai|Chennai|Kolkata|Pune
Bangalore|Karachi|Lahore|Dhaka|Colombo|Kathmandu|Bangkok|Hanoi|Jakarta|Manila|Singapore|Kuala Lumpur|Taipei
Shanghai|Shenzhen|Guangzhou|Chengdu|Wuhan|Osaka|Kyoto|Sapporo|Nagoya|Busan|Sydney|Melbourne|Perth|Brisbane
Adelaide|Auckland|Wellington|Toronto|Montreal|Vancouver|Calgary|Ottawa|New York|Boston|Chicago|Seattle|Denver
Miami|Dallas|Austin|Houston|Atlanta|Phoenix|Portland|San Francisco|San Diego|Los Angeles|Las Vegas|Detroit
Philadelphia|Washington|Mexico City|Bogota|Medellin|Quito|Santiago|Buenos Aires|Montevideo|Sao Paulo
Rio de Janeiro|Salvador|Havana|Panama City|San Jose|Edinburgh|Glasgow|Manchester|Liverpool|Leeds|Bristol|Oxford
Cambridge|Cardiff|Belfast|Cork|Galway|Antwerp|Ghent|Rotterdam|Utrecht|Gothenburg|Bergen|Tampere|Riga|Vilnius
Tallinn|Minsk|Kyiv|Odesa|Sofia|Bucharest|Belgrade|Zagreb|Ljubljana|Bratislava|Split|Tirana|Skopje|Tbilisi""".replace(
    "\n", "|"
).split("|")

US_CITIES = {
    "San Francisco": "CA", "Los Angeles": "CA", "San Diego": "CA", "New York": "NY", "Boston": "MA",
    "Chicago": "IL", "Seattle": "WA", "Denver": "CO", "Miami": "FL", "Dallas": "TX", "Austin": "TX",
    "Houston": "TX", "Atlanta": "GA", "Phoenix": "AZ", "Portland": "OR", "Las Vegas": "NV",
    "Detroit": "MI", "Philadelphia": "PA",
}  # fmt: skip

ITEMS = """notebook|pencil|lamp|chair|table|backpack|jacket|umbrella|keyboard|monitor|mouse|headphones|camera|bicycle
helmet|water bottle|coffee mug|teapot|blanket|pillow|rug|clock|mirror|candle|phone case|charger|tablet|printer
stapler|scissors|rope|tent|flashlight|hammer|screwdriver|drill|ladder|bucket|broom|towel|soap|toothbrush|shampoo
guitar|violin|drum|puzzle|board game|novel|cookbook|atlas|poster|vase|basket|wallet|belt|scarf|hat|gloves|boots
sandals|raincoat|sweater|shirt|skirt|desk|bookshelf|sofa|bench|toaster|kettle|blender|frying pan|knife|fork|spoon
plate|bowl|glass|bag of rice|box of tea|bar of chocolate|jar of honey|bottle of oil|loaf of bread""".replace(
    "\n", "|"
).split("|")

FOODS = """pizza|pasta|rice|sushi|soup|salad|bread|cheese|apple pie|noodles|dumplings|curry|tacos|pancakes|omelette
chocolate|ice cream|mango|strawberries|falafel|hummus|paella|ramen|burgers|lasagna|porridge|risotto|kebab|waffles
roast potatoes|lentil stew|fried fish|spring rolls|tomato soup|apple|banana|orange|grapes|cherries|peaches""".replace(
    "\n", "|"
).split("|")

COLOURS = "red blue green yellow purple orange black white pink brown grey silver gold turquoise violet crimson".split()

ANIMALS = """cat dog rabbit hamster parrot goldfish turtle horse pony goat lizard canary ferret snake duck hen
donkey sheep cow pig mouse frog""".split()

PET_NAMES = """Biscuit Luna Max Bella Rocky Milo Daisy Pepper Coco Ginger Shadow Buddy Oreo Simba Nala Toby Ziggy
Pickle Mocha Hazel Rusty Sunny Muffin Waffles Bruno Dusty Poppy Cleo Jasper Willow""".split()

JOBS = """teacher|nurse|doctor|engineer|farmer|baker|driver|pilot|carpenter|painter|writer|musician|lawyer|chef|dentist
electrician|plumber|gardener|librarian|photographer|translator|architect|accountant|software developer|student
scientist|firefighter|police officer|tailor|journalist|designer|mechanic|waiter|postman|actor|biologist""".replace(
    "\n", "|"
).split("|")

HOBBIES = """reading|cooking|hiking|swimming|chess|painting|cycling|gardening|photography|dancing|singing|fishing|knitting
running|climbing|drawing|yoga|sailing|skiing|playing the piano|playing the guitar|playing football|bird watching
baking|writing poems|astronomy|pottery|tennis|surfing|juggling""".replace("\n", "|").split("|")

COMPANIES = """Northwind|Bluebird Tools|Oak and Iron|Harbor Foods|Silverline|Copper Kettle|Meadow Labs|Redwood Books
Starfish Travel|Granite Works|Lumen Design|Atlas Freight|Pinecone Toys|Riverside Clinic|Solar Path|Kite Software
Marble Arts|Delta Garden|Maple Bank|Cobalt Systems|Fern Studio|Amber Films|Polar Logistics|Quartz Media""".replace(
    "\n", "|"
).split("|")

MONTHS = """January February March April May June July August September October November December""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

TASKS = """buy milk|call the dentist|water the plants|pay the rent|send the report|book a table|clean the kitchen
pick up the parcel|feed the cat|renew the passport|wash the car|write to grandma|return the library books
fix the bike|take out the trash|order new glasses|back up the laptop|prepare the slides|buy a birthday cake
charge the camera|iron the shirts|check the oven|walk the dog|stretch for ten minutes|drink some water
sign the contract|reply to the landlord|print the tickets|plan the trip|finish the homework|sort the mail""".replace(
    "\n", "|"
).split("|")

TOPICS = """solar panels|cheap flights|healthy breakfast ideas|the history of tea|electric cars|vegan recipes
mountain bikes|piano lessons|weather forecasts|local museums|used laptops|yoga classes|growing tomatoes
python tutorials|train timetables|jazz concerts|budget hotels|running shoes|bird migration|black holes|volcanoes
the Roman Empire|machine learning|ocean currents|medieval castles|sourdough bread|space telescopes|wind power
the northern lights|learning Spanish|home insurance|garden furniture|science fiction films|whale songs
old maps|paper airplanes|board games for two|recycling rules|street photography|ancient Egypt""".replace(
    "\n", "|"
).split("|")

NOUNS = """river stone garden window forest letter mountain bridge market lantern harbor village island castle
engine mirror ribbon shadow planet pocket basket ladder candle feather button kitchen meadow orchard pebble sailor
tunnel valley whistle winter summer morning evening thunder blanket barrel copper velvet marble pepper silver
puzzle rocket saddle temple ticket turnip walnut wagon anchor arrow badge beacon bottle branch cabin canal
carpet cellar circle cloud comet coral cradle desert dragon eagle ember fabric falcon fiddle flame galaxy ginger
glacier hammer harvest helmet honey jungle kettle lemon lizard magnet needle ocean olive onion paddle palace
parrot pencil pigeon pirate pillow prairie rabbit raven sandal school signal spider spring stable statue sugar
swan thimble tiger timber tower treasure trumpet tulip turtle valley violin volcano willow wizard""".split()

ADJECTIVES = """small large old new bright dark quiet loud warm cold happy sad quick slow soft hard clean dusty
brave gentle proud shy clever funny lazy busy empty full heavy light long short tall tiny round sharp smooth
sweet bitter fresh golden wooden""".split()

SYLLABLES = """ba be bo da de do fa fi ga go ha hi ja jo ka ke ko la le lo lu ma me mi mo na ne ni no pa pe po ra re
ri ro sa se so ta te ti to tu va ve vi wa ya yo za ze zo bran cor dal fen gar hel kor lan mar nor per ren sal tor
val wen zan thal mir ost""".split()
