"""Made-up conversations to have a model say what it says: questions of many kinds, and the Python
manual as Python ships it. None of them is from this project's tests or benchmarks."""

from __future__ import annotations

import inspect
import json
import random
import shlex
import string
import textwrap
from collections.abc import Callable
from pydoc_data.topics import topics

_THINGS = """\
volcanoes, bees, bread, steam engines, glaciers, chess, violins, coffee, tides, the Roman Empire,
photosynthesis, vaccines, magnets, whales, rainbows, the stock market, inflation, bicycles, trees,
earthquakes, batteries, cheese, origami, jazz, lighthouses, penguins, compilers, databases, poetry,
the printing press, black holes, comets, DNA, dreams, memory, sleep, running, yoga, gardening,
soap, glass, paper, sailing ships, trains, satellites, robots, candles, maps, calendars, coral
reefs, ants, owls, wolves, horses, rice, chocolate, tea, olive oil, honey, silk, cotton, gold,
salt, iron, lasers, the ear, the heart, the liver, muscles, bones, blood, hormones, viruses,
bacteria, mushrooms, ferns, deserts, rivers, clouds, thunder, wind turbines, solar panels, nuclear
power, recycling, cities, bridges, castles, cathedrals, museums, theatres, opera, film,
photography, painting, sculpture, democracy, constitutions, elections, taxes, banks, insurance,
contracts, unions, schools, libraries, universities, algebra, geometry, probability, prime numbers,
statistics, logic, ethics, philosophy, friendship, teamwork, leadership, negotiation, public
speaking, writing, reading, languages, grammar, dictionaries, alphabets, telephones, radio,
television, the internet, encryption, search engines, operating systems, video games, board games,
football, tennis, swimming pools, mountains, caves, islands, lakes, oceans, sharks, octopuses,
butterflies, spiders, snakes, frogs, dinosaurs, fossils"""
_PLACES = """\
Norway, Japan, Brazil, Kenya, Egypt, Peru, Canada, India, Portugal, Iceland, Greece, Mexico, Vienna,
Istanbul, Lisbon, Kyoto, Cairo, Prague, Nairobi, Toronto, Edinburgh, Sydney, Lima, Hanoi, Seoul"""
_PEOPLE = """\
Marie Curie, Isaac Newton, Leonardo da Vinci, Cleopatra, Albert Einstein, Ludwig van Beethoven,
Ada Lovelace, Charles Darwin, Galileo Galilei, Florence Nightingale, Nelson Mandela, Aristotle,
William Shakespeare, Johann Sebastian Bach, Rosa Parks, Alan Turing, Jane Austen, Frida Kahlo"""
_GOALS = """\
cook rice, learn a language, save money, fall asleep, write a letter, prepare for an interview,
grow tomatoes, bake a cake, fix a flat tire, train a dog, make new friends, plan a trip, give a
talk, read more books, run five kilometres, remember names, clean a kitchen, choose a laptop, move
to another city, start a small business, draw a face, play the guitar, stay calm under stress, wake
up early, organise a birthday party, study for an exam, write a resume, eat healthier, stop
procrastinating, take better photos, paint a wall, knit a scarf, brew tea, sharpen a knife"""
_TASKS = """\
reverses a string, checks whether a number is prime, sums a list, counts the words in a text, finds
the largest of three numbers, sorts a list of tuples by the second item, merges two dicts, reads a
CSV file, computes a factorial, prints the Fibonacci numbers, removes duplicates from a list,
checks whether a word is a palindrome, converts Celsius to Fahrenheit, flattens a nested list,
finds the most common character, validates an email address, computes the mean and the median,
implements binary search, implements a queue, models a bank account, models a library of books,
downloads a web page, writes a list to a file, parses a date, generates a random password, counts
vowels, transposes a matrix, finds common elements of two lists, rolls two dice, splits a list into
chunks, computes the greatest common divisor, implements bubble sort, times a function call,
retries a function on failure, caches results, walks a folder of files"""
_FEELINGS = "tired, bored, nervous, happy, lonely, stressed, curious, hungry, proud, confused"
_JOBS = """\
teacher, nurse, farmer, pilot, baker, engineer, lawyer, gardener, musician, carpenter, librarian"""


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.replace("\n", " ").split(",")]


THINGS, PLACES, PEOPLE, GOALS, TASKS, FEELINGS, JOBS = map(
    _listed, (_THINGS, _PLACES, _PEOPLE, _GOALS, _TASKS, _FEELINGS, _JOBS)
)

_TEMPLATES = """\
What can you tell me about {thing}?|Explain {thing} to a child.|How do {thing} work?
Why are {thing} important?|Give me five facts about {thing}.|Write a short paragraph about {thing}.
What is the history of {thing}?|Write a poem about {thing}.|Compare {thing} and {thing2}.
List some common mistakes people make about {thing}.|Summarise what we know about {thing}.
What would the world be like without {thing}?|Who should learn about {thing}, and why?
Write four sentences about {thing}.|Tell me a short story about {thing} and {thing2}.
Describe {thing} in simple words.|What is the best book to read about {thing}?
I am writing an essay about {thing}. Can you give me an outline?|Define {thing}.
What are the advantages and disadvantages of {thing}?|Is it true that {thing} are dangerous?
How do I {goal}?|What is the easiest way to {goal}?|Give me tips to {goal}.
I want to {goal}. Where do I start?|How long does it take to {goal}?|Can you help me {goal}?
Make a checklist for somebody who wants to {goal}.|What do I need to {goal}?
What should I see in {place}?|Plan three days in {place}.|What is the food like in {place}?
What is the capital and the climate of {place}?|Tell me about the culture of {place}.
Who was {person}?|What did {person} do?|Why do we remember {person}?
Write a short biography of {person}.|What could we learn from {person}?
Write a Python function that {task}.|Write a Python program that {task}, with comments.
Write a JavaScript function that {task}.|Show me a Python class which {task}.
How would you test code which {task}?|Explain step by step how a program {task}.
Write a Python function that {task}. Add a docstring and an example.
I feel {feeling} today. What can I do?|My friend is {feeling}. What should I say?
What does a {job} do all day?|How do I become a {job}?|Write an email to a {job} asking for advice.
Write a thank you note to a {job}.|Write a dialogue between a {job} and a {job2}.
What is {n} times {m}?|If I have {n} apples and eat {m2}, how many are left?
Hello!|Hi, how are you?|What can you do?|Tell me a joke.|Good morning! What shall we talk about?
Give me a recipe with {thing}.|Suggest a name for a shop that sells {thing}.
Translate into French: I like {thing}.|Write a headline about {thing}."""
TEMPLATES = [one for line in _TEMPLATES.splitlines() for one in line.split("|")]

_ABOUT_TEXT = (
    "Summarise the following text.\n\n{text}",
    "Copy this text exactly.\n\n{text}",
    "Explain this in simple words:\n\n{text}",
    'What does this mean?\n\n"{text}"',
    "Rewrite the following text more clearly.\n\n{text}",
    "Correct the spelling of this text and return it.\n\n{text}",
    "Write three questions about this text.\n\n{text}",
)
_ABOUT_CODE = (
    "Explain this code.\n\n```python\n{code}\n```",
    "Add comments to this code.\n\n```python\n{code}\n```",
    "Is there a mistake in this function?\n\n```python\n{code}\n```",
    "Return this code with shorter names.\n\n```python\n{code}\n```",
)
_NEXT = """\
Tell me more about that.|Can you make that shorter?|Why?|Can you give me an example?|Thank you!
What else should I know?|Say that again in simpler words.|Now write it as a list.|Are you sure?
What is the most important point?|How would I explain this to a friend?|And what comes after that?
Write it again, but more formal.|What would you do first?|Is there another way?
That helps, thanks."""
FOLLOWING = [one for line in _NEXT.splitlines() for one in line.split("|")]

_FUNCTIONS: tuple[Callable[..., object], ...] = (
    *(shlex.join, string.capwords, json.dump, textwrap.indent, inspect.getmro, inspect.cleandoc),
    *(random.Random.shuffle, random.Random.choice, random.Random.randrange, textwrap.fill),
    *(inspect.isfunction, inspect.getcomments, json.loads, shlex.quote, inspect.getmodulename),
)


def question(rng: random.Random) -> str:
    """What a conversation begins with."""
    kind = rng.random()
    if kind < 0.08:
        paragraphs = [p for p in topics[rng.choice(sorted(topics))].split("\n\n") if len(p) > 150]
        text = " ".join(rng.choice(paragraphs).split())[:500] if paragraphs else "Spam and eggs."
        return rng.choice(_ABOUT_TEXT).format(text=text)
    if kind < 0.14:
        code = textwrap.dedent(inspect.getsource(rng.choice(_FUNCTIONS)))[:500]
        return rng.choice(_ABOUT_CODE).format(code=code)
    (thing, thing2), (job, job2) = rng.sample(THINGS, 2), rng.sample(JOBS, 2)
    n, m = rng.randint(3, 99), rng.randint(2, 20)
    return rng.choice(TEMPLATES).format(
        thing=thing,
        thing2=thing2,
        job=job,
        job2=job2,
        goal=rng.choice(GOALS),
        place=rng.choice(PLACES),
        person=rng.choice(PEOPLE),
        task=rng.choice(TASKS),
        feeling=rng.choice(FEELINGS),
        n=n,
        m=m,
        m2=min(n, m),
    )


def next_question(rng: random.Random) -> str:
    return rng.choice(FOLLOWING)
