"""What the demo's user says: somebody reads a report aloud, part by part, and asks about it."""

from __future__ import annotations

SYSTEM = (
    "You help an engineer who reads the yearly report of a small town's waterworks. "
    "Answer briefly, from the report alone."
)

# Each is some 380 tokens long: with the answers, five make a prompt of more than 2,000.
PARTS = (
    (
        "How many springs feed the works, and which of them is the strongest?",
        """\
Part one, the springs. The waterworks of Kestrel Bay take their water from four springs on the
northern slope of Mount Orrin, between 310 and 420 metres above the sea. The strongest is the
Abbey Spring, which gave 41 litres a second on the yearly average; the Upper and the Lower Fern
Spring gave 18 and 15 litres, and the small Chapel Spring 6. Together they are enough for the
town in all months but August, when the guests of the summer double the number of people who
wash, cook and drink here. The springs were measured every week by the same two people with the
same weir plates, so the figures of this year can be compared with those of the last eleven. They
show no trend: dry years follow wet ones, and the mountain gives back with a delay of about five
months what has fallen on it as snow. The catchment of the Abbey Spring was fenced anew in April
after cattle had broken in twice. No trace of them was found in the water, but the spring was
shut off for nine days as a precaution, and the works lived from the others and from the
reservoir. The chamber of the Chapel Spring, built in 1911, leaks at its southern wall. Roots
have opened the joints, and in heavy rain brown water comes in. We turned it off by hand on
fourteen days. A valve that closes by itself when the water turns cloudy has been ordered and
will be put in before the winter. We recommend that the chamber be rebuilt in the year after
next, when the road to it will be open anyway for the new electric line. Until then the two
people who measure should look at the wall on every visit and write down how far the cracks have
come.""",
    ),
    (
        "Why was the second basin of the reservoir emptied?",
        """\
Part two, the reservoir. All spring water runs by its own weight through nine kilometres of pipe
to the reservoir above the old quarry, two basins of 1,200 cubic metres each. From there the town
is supplied without a single pump, which is why the works use less electricity than the school.
The first basin was cleaned in March, as it is every year: it was emptied over two days,
scrubbed, rinsed and filled again, and its water was released to the net only when three samples
in a row were clean. The second basin was emptied in September, out of turn, because a diver who
inspected the inlet had seen that the coating of the floor came off in flakes as large as a hand.
The flakes are harmless, but what lies under them is concrete from 1964, and soft water eats
concrete. The floor was dried, ground and coated again with a mineral mortar that needs no
solvent. That took five weeks, twice as long as planned, because the autumn was damp and the
mortar would not set. During this time the town lived from one basin. On two evenings its level
fell below the reserve that is kept for fires, and the fire brigade was told so and brought a
tanker into the upper town. We have learned from it: such work will be done in February, when
people use the least water and the air in the basin can be dried with the heat of the pump house.
The clock that records the level stopped in June and was replaced by an electronic one. It sends
its figures to the office every minute, so that nobody needs to drive up the hill at night any
more to read it.""",
    ),
    (
        "How much water was lost in the pipes, and what was done against it?",
        """\
Part three, the pipes. The net has 63 kilometres of pipe, of which 22 are cast iron from before
the second war, 30 are steel or cement and 11 are plastic. Of the water that left the reservoir
17 percent did not arrive at any meter; the year before it had been 21. We found the difference
by listening. In every second night of the spring two colleagues walked the streets between two
and four, when nobody draws water and a leak can be heard through a rod set on a valve. They
marked 38 places, and at 31 of them there was indeed a leak when the street was opened. The
largest, under the fish market, had lost three litres a second, perhaps for years, and had gone
unseen into the harbour. The pipe in Mill Lane burst on the second of February in the frost and
flooded four cellars; the insurance has paid for all of them. We replaced 1.4 kilometres of cast
iron, in Mill Lane, Rope Street and behind the church. At this speed it will take sixteen years
until the last of the old iron is out of the ground, which is about how long it can be expected
to last. The valves are a greater worry. Of the 410 in the net 57 could not be turned when we
tried them, so that in a burst a larger part of the town has to be cut off than would be needed.
Thirty have been made to move again with patience and oil, and the others are on the list for
this year. Every valve that was touched now has a small plate on the nearest wall that says how
far away it lies and in which direction it closes, since not all of them close to the right.""",
    ),
    (
        "Which substance was found above its limit, and where?",
        """\
Part four, the quality. The laboratory of the district took 96 samples at 12 places, from the
springs to the kitchen tap of the hospital, and looked at 48 things in each. The water is soft,
four degrees, and so clean that nothing has to be added to it on most days. In 94 samples
everything was within its limit. One sample from the school of the lower town had lead at 14
micrograms in a litre, where 10 are allowed. The lead did not come from our net but from a pipe
in the house itself, some eleven metres that nobody had on a drawing. The children drank bottled
water for three weeks until it had been replaced, and a letter went to the owners of all 220
houses from the same years with an offer to test their water for nothing. So far 131 have asked
for it; six more pipes have been found. The other sample that was out of bounds came from the end
of the line to the camp site, where the water stood for too long in winter and had too many
germs, though none that make ill. The line is now flushed every Monday from October to April. The
ultraviolet lamp behind the Chapel Spring ran for 212 hours, on the days when that water was
cloudy and still needed. Nitrate, which worries our neighbours in the valley, is at three
milligrams, since nobody farms above the springs. We also looked for the first time for the very
durable substances that are used in pans and rain coats. They were found in none of the springs,
and we intend to look again every third year. All results hang in the town hall and can be read
by everyone.""",
    ),
    (
        "What does the plan for the next year cost, and what is the largest item?",
        """\
Part five, money and plans. The works took in 1.84 million crowns and spent 1.79 million, so that
50,000 go to the reserve. A cubic metre costs a household 1.95, as it has for four years. Of what
was spent 38 percent were wages for the nine people of the works, 29 percent pipes and digging,
14 percent the second basin, 8 percent interest, and the rest was tests, cars, insurance and
paper. Electricity was less than one percent. For the next year the council has approved a plan
of 640,000 crowns. The largest item, at 310,000, is the new main under the railway from the
quarry to the lower town, which will let us close the old one for repairs for the first time
since it was laid. Eighty thousand are for valves, 75,000 for the cast iron in Harbour Street,
60,000 for meters that can be read from the street, 45,000 for the closing valve and the first
drawings of the Chapel Spring, and 40,000 for a second tanker, so that the reserve for fires does
not again depend on one basin. The remaining 30,000 are kept back for what nobody foresees. The
price of water will have to rise by ten hundredths in the year after, when the loan for the main
begins to be paid off. We have asked for this to be said early and plainly. Two of the nine
people will retire within three years, and with them goes the knowledge of where many pipes
really lie. An apprentice has been found who began in September and walks with them every
Thursday, with a map and a pencil, to write down what is only in their heads.""",
    ),
)

# One turn adds about 430 tokens with its answer, and the engines serve 8,192.
MAX_TURNS = 15


def message(turn: int) -> str:
    """What the user says in `turn`, counted from 1. After the last part the first comes again."""
    round_, part = divmod(turn - 1, len(PARTS))
    question, report = PARTS[part]
    before = f"I read it to you again, time {round_ + 1}. " if round_ else ""
    return f"{before}{report.replace(chr(10), ' ')}\n\n{question}"


def question(turn: int) -> str:
    """The question alone."""
    return PARTS[(turn - 1) % len(PARTS)][0]
