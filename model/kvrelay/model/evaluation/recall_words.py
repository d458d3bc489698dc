"""Words of the recall tasks. The training script has its own lists, and none of these subjects is in them."""

SUBJECTS = (
    "harbour", "lighthouse", "observatory", "bakery", "vineyard", "sawmill", "aquarium", "monastery", "brewery",
    "greenhouse", "planetarium", "tannery", "foundry", "quarry", "shipyard", "orchard", "windmill", "racecourse",
    "ferry terminal", "cable car", "clock tower", "botanical garden", "fish market", "ice rink",
)  # fmt: skip
NUMBER_ATTRIBUTES = ("access code", "serial number", "phone extension", "invoice number", "room number")
WORD_ATTRIBUTES = ("password", "code name", "mascot", "favourite colour", "home town")
PERSON_ATTRIBUTES = ("manager", "owner", "architect", "inspector")

WORDS = (
    "heron", "walnut", "copper", "violet", "badger", "saffron", "granite", "thistle", "falcon", "amber", "juniper",
    "otter", "cobalt", "maple", "raven", "ginger", "marble", "clover", "indigo", "lynx",
)  # fmt: skip
FIRST_NAMES = ("Ingrid", "Tomas", "Leila", "Marcus", "Yuki", "Petra", "Samuel", "Nadia", "Oscar", "Helen")
LAST_NAMES = ("Brandt", "Okafor", "Lindgren", "Moreau", "Tanaka", "Novak", "Castillo", "Fischer", "Marsh", "Doyle")

STATEMENTS = (
    "The {attribute} of the {subject} is {value}.",
    "Remember that the {attribute} of the {subject} is {value}.",
    "The {subject}'s {attribute} is {value}.",
    "Note that the {attribute} for the {subject} is {value}.",
)
QUESTIONS = (
    "What is the {attribute} of the {subject}?",
    "What is the {subject}'s {attribute}?",
    "Tell me the {attribute} of the {subject}.",
)
