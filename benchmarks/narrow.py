"""A narrow traffic, as one application has it: order mails from which fields are to be extracted, all with the same
instruction. What a drafter of one's own gains on such texts is measured with it (docs/narrow-traffic.md).

python -m benchmarks.narrow COUNT [SEED] > prompts.jsonl
"""

from __future__ import annotations

import json
import sys

import numpy as np

_INSTRUCTION = """Extract the order from the mail, like this.

Mail:
Hello, I am Erik Sand from Lund. I would like 12 seed trays by Friday, please.
Order:
- Customer: Erik Sand
- City: Lund
- Item: seed trays
- Quantity: 12
- Delivery: Friday
- Summary: Erik Sand from Lund orders 12 seed trays, to be delivered on Friday.

Mail:
Please deliver 7 rose arches to our shop in Graz on Monday. Kind regards, Ida Frank
Order:
- Customer: Ida Frank
- City: Graz
- Item: rose arches
- Quantity: 7
- Delivery: Monday
- Summary: Ida Frank from Graz orders 7 rose arches, to be delivered on Monday.

Mail:
"""
_FIRST = ("Anna", "Bruno", "Carla", "Dieter", "Elena", "Farid", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Luca",
          "Marta", "Nils", "Olga", "Pavel", "Quentin", "Rosa", "Stefan", "Tilda")  # fmt: skip
_LAST = ("Albers", "Brandt", "Costa", "Dorn", "Ekholm", "Fabbri", "Graf", "Holm", "Ivanova", "Jensen", "Kraus", "Lund",
         "Moreau", "Novak", "Ortega", "Peters", "Rossi", "Schulz", "Toth", "Weber")  # fmt: skip
_CITIES = ("Aachen", "Bergen", "Cordoba", "Dresden", "Enschede", "Florence", "Ghent", "Halle", "Innsbruck", "Jena",
           "Krakow", "Lyon", "Malmo", "Nantes", "Odense", "Porto", "Rostock", "Siena", "Tampere", "Ulm")  # fmt: skip
_ITEMS = ("hedge shears", "garden hoses", "leaf rakes", "watering cans", "pruning saws", "wheelbarrows", "hand trowels",
          "compost bins", "rain barrels", "lawn edgers", "spades", "bulb planters", "bird feeders", "grass seed bags",
          "work gloves", "plant labels")  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MAILS = (
    "Hello,\nplease send {n} {item} to our branch in {city}. We need them by {day}.\nBest regards,\n{name}",
    "Good morning, this is {name} from {city}. Could you deliver {n} {item} on {day}? Thank you very much.",
    "Dear team,\nthe last delivery was fine. This time I would like to order {n} {item}. My address in {city} is still "
    "the same; {day} would be best.\nYours, {name}",
    "Hi! I saw your offer and want {n} {item} for my garden in {city}. {day} is good for me, I am at home all day. "
    "Cheers, {name}",
    "To whom it may concern: on behalf of {name}, we order {n} {item}. Ship to {city}, arriving no later than {day}.",
    "Please change my order. Not gloves, but {n} {item}, and to {city} instead of the old place. {day} is still the "
    "day. Sorry for the trouble! {name}",
)


def prompts(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Prompts with the keys that `dflash-ort distill`, `record` and `bench` read; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        mail = str(rng.choice(_MAILS)).format(
            n=int(rng.integers(2, 60)),
            item=rng.choice(_ITEMS),
            city=rng.choice(_CITIES),
            day=rng.choice(_DAYS),
            name=f"{rng.choice(_FIRST)} {rng.choice(_LAST)}",
        )
        made.append({"suite": "orders", "id": f"order-{seed}-{number}", "turns": [f"{_INSTRUCTION}{mail}\nOrder:"]})
    return made


def main() -> None:
    """Print as many prompts as are asked for."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for prompt in prompts(count, seed):
        print(json.dumps(prompt))


if __name__ == "__main__":
    main()
