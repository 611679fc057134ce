"""What the rooms of the drawn problems have in them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Room:
    fixed: Sequence[str]
    """Types of receptacles of which each room has one"""
    further: Sequence[str]
    """Types of receptacles that are drawn, as often as they stand here"""
    objects: Sequence[str]
    """Types of objects that lie about"""


def _words(text: str) -> list[str]:
    return text.split()


KITCHEN = Room(
    fixed=_words("Fridge Microwave SinkBasin CounterTop"),
    further=_words(
        "Cabinet Cabinet Cabinet Drawer Drawer StoveBurner DiningTable CounterTop Shelf CoffeeMachine "
        "GarbageCan SideTable"
    ),
    objects=_words(
        "Apple Bowl Bread ButterKnife Cup DishSponge Egg Fork Glassbottle Kettle Knife Ladle Lettuce Mug Pan "
        "PepperShaker Plate Pot Potato SaltShaker SoapBottle Spatula Spoon Tomato WineBottle"
    ),
)
LIVING_ROOM = Room(
    fixed=_words("SideTable Sofa CoffeeTable"),
    further=_words("ArmChair Drawer Drawer Shelf Shelf Dresser DiningTable Cabinet Ottoman GarbageCan Safe"),
    objects=_words(
        "Book Box CreditCard HousePlant KeyChain Laptop Newspaper Pillow Plate RemoteControl Statue TissueBox Vase "
        "Watch WateringCan"
    ),
)
BEDROOM = Room(
    fixed=_words("Desk Bed SideTable"),
    further=_words("Drawer Drawer Drawer Shelf Shelf Dresser ArmChair GarbageCan LaundryHamper Safe Cabinet"),
    objects=_words(
        "AlarmClock BaseballBat Book Bowl CD CellPhone CreditCard KeyChain Laptop Mug Pen Pencil Pillow "
        "TeddyBear TennisRacket"
    ),
)
BATHROOM = Room(
    fixed=_words("SinkBasin CounterTop Toilet"),
    further=_words(
        "Cabinet Cabinet Cabinet Drawer Drawer Shelf SideTable GarbageCan ToiletPaperHanger HandTowelHolder "
        "BathtubBasin"
    ),
    objects=_words("Candle Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper"),
)
LAMP = "DeskLamp"
LAMP_PLACES = frozenset(_words("Desk SideTable Dresser"))
