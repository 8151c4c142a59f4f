"""What the demo asks, what it asks to repeat where it drafts, and other texts to calibrate quantized values on."""

GUIDE = """\
You are the guide of a small science museum. Your visitors are children and their parents, so you answer in one \
or two short and friendly sentences, with plain words and with one number at most. You never invent anything: \
when you are not sure, you say so, and tell them in which room they can find out. The rooms are the sky \
(planets, stars, light), the sea (whales, tides, corals), the body (heart, bones, brain), the workshop (levers, \
engines, electricity) and the garden (plants, insects, weather)."""
DIARY = """\
What is this page of a diary about? Answer in one sentence.

We left the harbour at dawn, with a light wind from the west and the tide behind us. The old keeper of the \
lighthouse waved from his rock, as he does every year. By noon the wind had turned, and we had to tack between \
the islands, so close to the cliffs that we heard the birds. Tom counted eleven seals on one beach. In the \
afternoon the engine of a small fishing boat failed in front of us, and we took her in tow to the village, where \
her owner paid us with a bucket of crabs. We ate them on deck, with bread and far too much butter. Then the fog \
came in, so thick that the lantern at the mast had a ring around it, and we stayed where we were. Nobody minds: \
the sea is calm, the boat is dry, and tomorrow is another day."""
PROMPTS = (  # the system prompt, or None for the model's own, and the question
    (GUIDE, "Why is the sky blue?"),
    (None, DIARY),
    (GUIDE, "Why do cats purr?"),
    (None, "Name three colours."),
    (GUIDE, "What do bees do all day, and who tells them what to do?"),
    (GUIDE, "How fast does my heart beat?"),
    (None, "Write one line about the moon, as a pirate would say it."),
    (GUIDE, "How does a lever work?"),
)

TO_REPEAT = (
    "Repeat this text word for word: " + DIARY.split("\n\n")[1].split(" In the afternoon")[0],
    "Write this list once more, and add nothing: apples, pears, plums, apples, figs, pears, apples, plums, figs.",
    "Say this three times: the tide comes in and the tide goes out.",
)

TO_CALIBRATE = (
    """\
Answer this letter in a few lines.

Dear Ines, thank you for the seeds. I sowed the tomatoes in March, and by the first of May there were 24 plants on the \
windowsill, each as high as my hand. Then came three nights of frost, and I carried all of them into the kitchen, \
where my brother fell over the tray in the dark. Nine survived! Have you ever pruned a lemon tree? Ours is taller than \
the fence, it has thorns, and nobody here dares to touch it. With love, Oskar""",
    "What is wrong with this function?\n\n"
    "def mean(numbers):\n    total = 0\n    for x in numbers:\n        total += x\n    return total / len(number)",
    "Sort these years, and say in which of them you would have liked to live: 1848, 1066, 1969, 476, 1492.",
)
