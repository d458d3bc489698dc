# ruff: noqa: SIM905  (word lists read better as text)
"""Word lists the training facts are made of. None of the evaluation's subjects is among the nouns."""

ADJECTIVES = """old new northern southern eastern western red blue green white black silver golden wooden stone iron
glass upper lower main second third central hidden quiet ancient modern little great long round broken royal public
private municipal coastal mountain river forest spare portable electric""".split()

NOUNS = """library museum bridge castle station airport hospital school office warehouse factory garden theatre cinema
hotel restaurant kitchen garage workshop laboratory archive vault tower gate tunnel canal dam mill farm barn stable
chapel cathedral market square park stadium gymnasium pool court prison bank shop studio gallery palace villa cottage
cabin tent caravan boat ship ferry tram train bus truck car bicycle aircraft rocket satellite telescope microscope
printer server router scanner camera projector piano violin guitar trumpet drum clock lamp desk cabinet drawer safe
chest box crate parcel suitcase backpack wallet notebook diary letter map painting statue carpet mirror window door
committee council company bakers club team orchestra choir band expedition mission project experiment course lecture
conference festival tournament race voyage journey flight cruise island village city valley lake desert glacier cave
volcano beach bay reef meadow field road street avenue plaza fountain well pump engine turbine generator reactor
battery antenna radio telephone radar compass anchor sail mast cargo container elevator staircase corridor basement
attic roof balcony terrace courtyard cellar storeroom pantry nursery clinic pharmacy embassy ministry court house
registry depot hangar dock pier jetty lock reservoir pipeline refinery mine smelter kiln press loom archive room
dog cat horse parrot turtle robot drone probe rover submarine balloon glider locomotive wagon sledge kayak""".split()

PREFIXES = ("Project", "Operation", "Team", "Unit", "Sector", "Building", "Room", "Camp", "Station", "Agent", "Mission")

NUMBER_ATTRIBUTES = """access code|serial number|phone extension|invoice number|room number|entry code|PIN|registration
number|order number|ticket number|licence number|account number|gate number|badge number|locker code|case number|
catalogue number|security code|model number|flight number|reference number|inventory number|combination|pass code|
parcel number|member number|customer number|postal code|alarm code|build number|port number|batch number"""
WORD_ATTRIBUTES = """password|code name|mascot|favourite colour|home town|nickname|secret word|call sign|motto|colour|
material|flag|main export|favourite animal|destination|keyword|label|theme|emblem|brand|flavour|passphrase|user name|
next stop|meeting place|favourite drink|codeword|birthplace|capital|sister city"""
PERSON_ATTRIBUTES = """manager|owner|architect|inspector|director|captain|designer|keeper|founder|librarian|engineer|
secretary|treasurer|author|driver|guardian|chair|sponsor|supervisor|neighbour|pilot|teacher|curator|contact|caretaker"""
DATE_ATTRIBUTES = """opening date|closing date|deadline|founding date|inspection date|delivery date|launch date|
expiry date|start date|review date|birthday|anniversary"""
AMOUNT_ATTRIBUTES = "height|length|weight|price|capacity|budget|depth|distance|speed limit|rent|fee|voltage|temperature"

COLOURS = "red blue green yellow orange purple violet black white grey brown pink turquoise crimson scarlet".split()
ANIMALS = "fox wolf bear eagle hawk owl swan goose crane seal whale dolphin tiger lion panther zebra camel deer".split()
THINGS = "oak pine birch willow cedar silver gold iron bronze quartz pepper cinnamon vanilla lemon apple plum".split()
PLACES = """Lisbon Oslo Vienna Prague Dublin Madrid Athens Cairo Nairobi Lima Quito Toronto Boston Denver Seattle
Kyoto Osaka Seoul Hanoi Delhi Mumbai Sydney Perth Auckland Geneva Zurich Munich Hamburg Bremen Turin
Naples Porto""".split()
FIRST_NAMES = """Anna Maria Laura Julia Clara Emma Sofia Greta Elena Irene Alice Ruth Nora Paula Diana John Peter Paul
David Daniel Martin Robert Victor Hugo Felix Simon Adam Jonas Erik Carlos Pablo Ahmed Omar Ravi Chen Ivan""".split()
LAST_NAMES = """Keller Weber Schmidt Larsen Hansen Berg Silva Costa Rossi Ferrari Dubois Laurent Smith Jones Taylor
Walker Clark Hall Young King Wright Hill Green Baker Carter Patel Singh Khan Kim Park Lee Wang Suzuki Ito""".split()
MONTHS = "January February March April May June July August September October November December".split()
UNITS = "metres kilograms euros litres seats kilometres tons hours minutes degrees volts".split()
SYLLABLES = """ba be bo da de do fa fi ga go ka ke ko la le li lo ma me mi mo na ne no pa po ra re ri ro sa se si so
ta te ti to va ve vo za zo bar den fal gor han jor kel lan mar nor pol quin ran sel tor ul ver wen xan
yor zel""".split()


def split_list(text: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in text.split("|"))
