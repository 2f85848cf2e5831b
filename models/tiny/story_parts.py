"""Sentences of stories; ``stories.py`` fills the ``{...}``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quest:
    """The hero's goal.

    Attributes:
        starts: how it begins, one of them.
        ends: how it ends well, one of them.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]


@dataclass(frozen=True)
class Obstacle:
    """The hero's obstacle.

    Attributes:
        name: its name in questions about the story.
        meets: how the hero meets it.
        tries: attempts that fail.
        solutions: what hero and friend do together.
    """

    name: str
    meets: tuple[str, ...]
    tries: tuple[str, ...]
    solutions: tuple[str, ...]


OPENINGS = (
    "Once upon a time, there was a {adjective} {kind} named {hero} who lived near a {home}.",
    "Long ago, a {adjective} {kind} named {hero} lived beside a {home}.",
    "{hero} was a {adjective} {kind} who lived in a little house by the {home}.",
    "In a house near the {home} lived a {adjective} {kind} named {hero}.",
    "Once there was a {kind} named {hero}. {He} was {adjective} and lived next to the {home}.",
)
HABITS = (
    "Every evening {he} sat at the window and counted the stars.",
    "{He} loved to sing while {he} worked.",
    "Everybody there knew {hero} and liked {him}.",
    "Most of all {he} liked {food} and long walks in the sun.",
    "{He} had a garden full of flowers and was never in a hurry.",
    "At night {he} dreamed of places far away.",
    "{He} always shared {his} {food} with the birds.",
    "In {his} pocket {he} always carried a piece of {food}.",
)
MORNINGS = (
    "One sunny morning,",
    "One windy morning,",
    "One cold winter day,",
    "One warm spring day,",
    "One rainy afternoon,",
    "One quiet evening,",
    "One foggy morning,",
    "On the first day of summer,",
)
QUESTS = (
    Quest(
        starts=(
            "{he} saw that {his} {colour} {object} was gone. "
            "{He} looked under the bed and behind the door, but it was not there.",
            "{he} could not find {his} {colour} {object}. {He} searched the whole house, from the roof to the floor.",
        ),
        ends=(
            "There, under an old tree, lay the {colour} {object}. {hero} was so happy that {he} danced.",
            "And there it was: the {colour} {object}, shining in the light. {hero} held it close and laughed.",
        ),
    ),
    Quest(
        starts=(
            "{his} grandmother became ill. {hero} packed a {colour} {object} and some {food} and set out to visit her.",
            "a letter came from {his} grandmother, who was ill. "
            "{hero} wanted to bring her {food} and a {colour} {object}.",
        ),
        ends=(
            "Grandmother opened the door and smiled. She ate the {food}, took the {colour} {object} and soon "
            "felt much better.",
            "Grandmother was so glad to see {him}. She put the {colour} {object} beside her bed, and they ate "
            "{food} together.",
        ),
    ),
    Quest(
        starts=(
            "{he} found an old map. It showed the way to a {colour} {object} that was hidden far away.",
            "a bird told {him} about a {colour} {object} that nobody had ever found. {hero} wanted to see it.",
        ),
        ends=(
            "At last {he} found the {colour} {object}. It was even more beautiful than {he} had dreamed.",
            "Behind a stone they found the {colour} {object}. {hero} could not believe {his} eyes.",
        ),
    ),
    Quest(
        starts=(
            "{he} met a lost little bird. It was crying because it could not find its nest. "
            "{hero} put it in a {colour} {object} and promised to help.",
            "{he} heard somebody cry. It was a little bird that had lost its way, and {hero} carried it home in "
            "a {colour} {object}.",
        ),
        ends=(
            "The little bird saw its nest and sang with joy. "
            "Its mother gave {hero} a feather, and {he} kept it in the {colour} {object}.",
            "The mother bird thanked them many times. From then on a song came from the tree each morning for "
            "{hero} and {his} {colour} {object}.",
        ),
    ),
    Quest(
        starts=(
            "{he} wanted to give a party. All that was missing was a {colour} {object}, and so {he} went out to "
            "look for one.",
            "{he} had to bring a {colour} {object} to the king. It was a great honour, and {he} left at once.",
        ),
        ends=(
            "In the end {he} had the {colour} {object}, and everybody came. "
            "They ate {food} and danced until the moon was high.",
            "Everybody clapped when {hero} came with the {colour} {object}. "
            "There was music, and there was {food} for all.",
        ),
    ),
)
JOURNEYS = (
    "{He} walked for a long time, past the {home} and over the green hills, until {he} came to a {place}.",
    "The way led through a {place}, and the wind was whispering in the leaves.",
    "{He} followed the road to a {place}, where everything was very still.",
    "Soon {he} reached a {place} that {he} had never seen before.",
)
OBSTACLES = (
    Obstacle(
        name="a wide river",
        meets=(
            "Behind it there was a wide river, and the bridge was broken.",
            "Then {he} stood before a wide river without a bridge.",
        ),
        tries=(
            "{hero} tried to jump over it, but it was much too far.",
            "{hero} put one foot into the water, but it was too deep and too cold.",
        ),
        solutions=(
            "They tied some logs together, sat down on them and crossed the river slowly and safely.",
            "They found an old boat in the grass, pushed it into the water and rowed to the other side.",
        ),
    ),
    Obstacle(
        name="a locked gate",
        meets=(
            "At the end of the path there was a locked gate.",
            "But a locked gate closed the way, and it was higher than a house.",
        ),
        tries=(
            "{hero} pushed and pulled, but the gate did not move.",
            "{hero} knocked and called, but nobody answered.",
        ),
        solutions=(
            "They looked under every stone and at last found a little key. It fitted, and the gate opened.",
            "They dug a small tunnel under the gate, and one after the other they crept through.",
        ),
    ),
    Obstacle(
        name="a dark cave",
        meets=(
            "The path went into a dark cave, and strange sounds came out of it.",
            "In front of {him} was a dark cave, and there was no other way.",
        ),
        tries=(
            "{hero} took three steps, but {he} could not see {his} own hand and turned back.",
            "{hero} called into the dark, but only {his} own voice came back, and {he} was afraid.",
        ),
        solutions=(
            "They lit a candle and went in hand in hand. The strange sounds were only drops of water.",
            "They sang a loud song together, and the dark was no longer frightening.",
        ),
    ),
    Obstacle(
        name="a great storm",
        meets=(
            "Suddenly the sky became black, and a great storm began.",
            "Then a great storm came up, with thunder and heavy rain.",
        ),
        tries=(
            "{hero} hid under a tree, but the rain came through the leaves.",
            "{hero} tried to walk on, but the wind pushed {him} back again and again.",
        ),
        solutions=(
            "They built a roof of branches and told each other jokes until the sun came out.",
            "They waited in a hollow tree, shared their {food} and watched the clouds go by.",
        ),
    ),
    Obstacle(
        name="a steep hill",
        meets=(
            "There the road went up a steep hill, as high as the clouds.",
            "Before {him} rose a steep hill of loose stones.",
        ),
        tries=(
            "{hero} climbed a little, but {he} slid down again each time.",
            "{hero} ran at it as fast as {he} could, but soon {he} was out of breath.",
        ),
        solutions=(
            "They took a long rope and pulled each other up, step by step, to the very top.",
            "They walked around it in small circles, slowly higher and higher, and never looked down.",
        ),
    ),
)
MEETINGS = (
    'Just then {a_friend_kind} came by. "I am {friend}," said the {friend_kind}. "Why are you so sad?"',
    '"Can I help you?" asked a voice. It was {friend}, {a_friend_kind} who was on {friend_his} way home.',
    '{Hero_tired} Then {a_friend_kind} named {friend} sat down next to {him}. "What is wrong?" asked {friend}.',
)
TIRED = (
    "{hero} wanted to give up.",
    "{hero} sat down on a stone and sighed.",
    "{hero} did not know what to do.",
)
PLANS = (
    '{hero} told {friend} everything. "Together we can do it," said {friend}.',
    '"I cannot do it alone," said {hero}. "Then let us do it together," said {friend}.',
    '{hero} explained what had happened. {friend} thought for a moment and smiled. "I have an idea," {friend_he} said.',
)
ENDINGS = (
    "From that day on, {hero} and {friend} were the best of friends.",
    "That evening {hero} and {friend} sat by the fire and told the story again and again.",
    "{hero} thanked {friend} and invited {friend_him} to stay for supper.",
)
LESSONS = (
    "And {hero} knew now that everything is easier with a friend.",
    "And {hero} never forgot that it is good to ask for help.",
    "And if they have not moved away, they still live there today.",
    "And {hero} slept deeply that night and smiled in {his} dreams.",
)
