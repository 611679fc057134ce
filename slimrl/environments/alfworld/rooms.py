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


KITCHEN = Room(
    fixed="Fridge Microwave SinkBasin CounterTop".split(),
    further="Cabinet Cabinet Cabinet Drawer Drawer StoveBurner DiningTable CounterTop Shelf CoffeeMachine "
    "GarbageCan SideTable".split(),
    objects="Apple Bowl Bread ButterKnife Cup DishSponge Egg Fork Glassbottle Kettle Knife Ladle Lettuce Mug Pan "
    "PepperShaker Plate Pot Potato SaltShaker SoapBottle Spatula Spoon Tomato WineBottle".split(),
)
LIVING_ROOM = Room(
    fixed="SideTable Sofa CoffeeTable".split(),
    further="ArmChair Drawer Drawer Shelf Shelf Dresser DiningTable Cabinet Ottoman GarbageCan Safe".split(),
    objects="Book Box CreditCard HousePlant KeyChain Laptop Newspaper Pillow Plate RemoteControl Statue TissueBox Vase "
    "Watch WateringCan".split(),
)
BEDROOM = Room(
    fixed="Desk Bed SideTable".split(),
    further="Drawer Drawer Drawer Shelf Shelf Dresser ArmChair GarbageCan LaundryHamper Safe Cabinet".split(),
    objects="AlarmClock BaseballBat Book Bowl CD CellPhone CreditCard KeyChain Laptop Mug Pen Pencil Pillow "
    "TeddyBear TennisRacket".split(),
)
BATHROOM = Room(
    fixed="SinkBasin CounterTop Toilet".split(),
    further="Cabinet Cabinet Cabinet Drawer Drawer Shelf SideTable GarbageCan ToiletPaperHanger HandTowelHolder "
    "BathtubBasin".split(),
    objects="Candle Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper".split(),
)
LAMP = "DeskLamp"
LAMP_PLACES = frozenset("Desk SideTable Dresser".split())
