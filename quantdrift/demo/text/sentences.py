"""Questions and answers in four languages, made by a small grammar: nothing is downloaded."""

from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec
from numpy.random import Generator


class Language(StrEnum):
    """The language of a question; its answer is in the same one."""

    EN = "en"
    DE = "de"
    ES = "es"
    FR = "fr"


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its answer."""

    language: Language
    question: str
    answer: str


EN, DE, ES, FR = Language
_Words = dict[Language, str]


def _words(en: str, de: str, es: str, fr: str) -> _Words:
    return {EN: en, DE: de, ES: es, FR: fr}


_EUROPE, _ASIA, _AFRICA, _SOUTH, _NORTH = (
    _words("Europe", "Europa", "Europa", "Europe"),
    _words("Asia", "Asien", "Asia", "Asie"),
    _words("Africa", "Afrika", "África", "Afrique"),
    _words("South America", "Südamerika", "América del Sur", "Amérique du Sud"),
    _words("North America", "Nordamerika", "América del Norte", "Amérique du Nord"),
)
_COUNTRIES: Final = (
    (_words("Peru", "Peru", "Perú", "Pérou"), _words("Lima", "Lima", "Lima", "Lima"), _SOUTH),
    (
        _words("Chile", "Chile", "Chile", "Chili"),
        _words("Santiago", "Santiago", "Santiago", "Santiago"),
        _SOUTH,
    ),
    (_words("Bolivia", "Bolivien", "Bolivia", "Bolivie"), _words("Sucre", "Sucre", "Sucre", "Sucre"), _SOUTH),
    (
        _words("Brazil", "Brasilien", "Brasil", "Brésil"),
        _words("Brasilia", "Brasilia", "Brasilia", "Brasilia"),
        _SOUTH,
    ),
    (
        _words("Colombia", "Kolumbien", "Colombia", "Colombie"),
        _words("Bogota", "Bogota", "Bogotá", "Bogota"),
        _SOUTH,
    ),
    (_words("Canada", "Kanada", "Canadá", "Canada"), _words("Ottawa", "Ottawa", "Ottawa", "Ottawa"), _NORTH),
    (
        _words("Mexico", "Mexiko", "México", "Mexique"),
        _words("Mexico City", "Mexiko-Stadt", "Ciudad de México", "Mexico"),
        _NORTH,
    ),
    (_words("Cuba", "Kuba", "Cuba", "Cuba"), _words("Havana", "Havanna", "La Habana", "La Havane"), _NORTH),
    (_words("Italy", "Italien", "Italia", "Italie"), _words("Rome", "Rom", "Roma", "Rome"), _EUROPE),
    (_words("Norway", "Norwegen", "Noruega", "Norvège"), _words("Oslo", "Oslo", "Oslo", "Oslo"), _EUROPE),
    (
        _words("Poland", "Polen", "Polonia", "Pologne"),
        _words("Warsaw", "Warschau", "Varsovia", "Varsovie"),
        _EUROPE,
    ),
    (
        _words("Austria", "Österreich", "Austria", "Autriche"),
        _words("Vienna", "Wien", "Viena", "Vienne"),
        _EUROPE,
    ),
    (
        _words("Hungary", "Ungarn", "Hungría", "Hongrie"),
        _words("Budapest", "Budapest", "Budapest", "Budapest"),
        _EUROPE,
    ),
    (
        _words("Greece", "Griechenland", "Grecia", "Grèce"),
        _words("Athens", "Athen", "Atenas", "Athènes"),
        _EUROPE,
    ),
    (
        _words("Portugal", "Portugal", "Portugal", "Portugal"),
        _words("Lisbon", "Lissabon", "Lisboa", "Lisbonne"),
        _EUROPE,
    ),
    (
        _words("Sweden", "Schweden", "Suecia", "Suède"),
        _words("Stockholm", "Stockholm", "Estocolmo", "Stockholm"),
        _EUROPE,
    ),
    (_words("Japan", "Japan", "Japón", "Japon"), _words("Tokyo", "Tokio", "Tokio", "Tokyo"), _ASIA),
    (
        _words("India", "Indien", "India", "Inde"),
        _words("New Delhi", "Neu-Delhi", "Nueva Delhi", "New Delhi"),
        _ASIA,
    ),
    (_words("China", "China", "China", "Chine"), _words("Beijing", "Peking", "Pekín", "Pékin"), _ASIA),
    (_words("Vietnam", "Vietnam", "Vietnam", "Viêt Nam"), _words("Hanoi", "Hanoi", "Hanói", "Hanoï"), _ASIA),
    (_words("Turkey", "Türkei", "Turquía", "Turquie"), _words("Ankara", "Ankara", "Ankara", "Ankara"), _ASIA),
    (
        _words("Egypt", "Ägypten", "Egipto", "Égypte"),
        _words("Cairo", "Kairo", "El Cairo", "Le Caire"),
        _AFRICA,
    ),
    (_words("Kenya", "Kenia", "Kenia", "Kenya"), _words("Nairobi", "Nairobi", "Nairobi", "Nairobi"), _AFRICA),
    (_words("Tunisia", "Tunesien", "Túnez", "Tunisie"), _words("Tunis", "Tunis", "Túnez", "Tunis"), _AFRICA),
)
_THINGS: Final = (
    (_words("the sky", "der Himmel", "el cielo", "le ciel"), _words("blue", "blau", "azul", "bleu")),
    (_words("the grass", "das Gras", "el césped", "le gazon"), _words("green", "grün", "verde", "vert")),
    (_words("the snow", "der Schnee", "la nieve", "la neige"), _words("white", "weiß", "blanca", "blanche")),
    (_words("the night", "die Nacht", "la noche", "la nuit"), _words("black", "schwarz", "negra", "noire")),
    (_words("the blood", "das Blut", "la sangre", "le sang"), _words("red", "rot", "roja", "rouge")),
    (
        _words("the lemon", "die Zitrone", "el limón", "le citron"),
        _words("yellow", "gelb", "amarillo", "jaune"),
    ),
    (
        _words("the elephant", "der Elefant", "el elefante", "l'éléphant"),
        _words("grey", "grau", "gris", "gris"),
    ),
    (
        _words("the chocolate", "die Schokolade", "el chocolate", "le chocolat"),
        _words("brown", "braun", "marrón", "brun"),
    ),
)
_DAYS: Final[dict[Language, tuple[str, ...]]] = {
    EN: ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    DE: ("Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag"),
    ES: ("lunes", "martes", "miércoles", "jueves", "viernes", "sábado", "domingo"),
    FR: ("lundi", "mardi", "mercredi", "jeudi", "vendredi", "samedi", "dimanche"),
}
_GREETINGS: Final[dict[Language, tuple[str, ...]]] = {
    EN: ("", "Hello, please tell me: ", "Good morning. ", "I have a question. "),
    DE: ("", "Hallo, sag mir bitte: ", "Guten Morgen. ", "Ich habe eine Frage. "),
    ES: ("", "Hola, dime por favor: ", "Buenos días. ", "Tengo una pregunta. "),
    FR: ("", "Bonjour, dis-moi s'il te plaît : ", "Bonjour. ", "J'ai une question. "),
}
_CAPITAL: Final = {
    EN: ("What is the capital of {0}?", "The capital of {0} is {1}. This country lies in {2}."),
    DE: ("Was ist die Hauptstadt von {0}?", "Die Hauptstadt von {0} ist {1}. Dieses Land liegt in {2}."),
    ES: ("¿Cuál es la capital de {0}?", "La capital de {0} es {1}. Este país está en {2}."),
    FR: (
        "Quelle est la capitale du pays {0} ?",
        "La capitale du pays {0} est {1}. Ce pays se trouve en {2}.",
    ),
}
_WHERE: Final = {
    EN: (
        "Where is the city of {1}?",
        "The city of {1} is in {0}. It is the capital of this country, which lies in {2}.",
    ),
    DE: (
        "Wo liegt die Stadt {1}?",
        "Die Stadt {1} liegt in {0}. Sie ist die Hauptstadt dieses Landes in {2}.",
    ),
    ES: ("¿Dónde está la ciudad de {1}?", "La ciudad de {1} está en {0}. Es la capital de este país de {2}."),
    FR: (
        "Où se trouve la ville de {1} ?",
        "La ville de {1} se trouve dans le pays {0}. C'est la capitale de ce pays en {2}.",
    ),
}
_COLOUR: Final = {
    EN: ("What colour is {0}?", "As far as I know, {0} is {1}. Most people would say so."),
    DE: ("Welche Farbe hat {0}?", "Soweit ich weiß, ist {0} {1}. Die meisten Leute sagen das."),
    ES: ("¿De qué color es {0}?", "Por lo que sé, {0} es {1}. La mayoría de la gente dice eso."),
    FR: ("De quelle couleur est {0} ?", "À ma connaissance, {0} est {1}. La plupart des gens le disent."),
}
_DAY: Final = {
    EN: ("Which day comes after {0}?", "After {0} comes {1}, and the day after that is {2}."),
    DE: ("Welcher Tag kommt nach {0}?", "Nach {0} kommt {1}, und der Tag danach ist {2}."),
    ES: ("¿Qué día viene después del {0}?", "Después del {0} viene el {1}, y el día siguiente es el {2}."),
    FR: ("Quel jour vient après {0} ?", "Après {0} vient {1}, et le jour suivant est {2}."),
}


def draw(language: Language, rng: Generator) -> Said:
    """Return a question with its answer."""
    form, words = _FORMS[int(rng.integers(len(_FORMS)))](language, rng)
    greeting = _GREETINGS[language][int(rng.integers(len(_GREETINGS[language])))]
    question, answer = form[language]
    return Said(language=language, question=greeting + question.format(*words), answer=answer.format(*words))


def _country(language: Language, rng: Generator) -> list[str]:
    return [words[language] for words in _COUNTRIES[int(rng.integers(len(_COUNTRIES)))]]


def _thing(language: Language, rng: Generator) -> list[str]:
    return [words[language] for words in _THINGS[int(rng.integers(len(_THINGS)))]]


def _days(language: Language, rng: Generator) -> list[str]:
    day = int(rng.integers(7))
    return [_DAYS[language][(day + step) % 7] for step in range(3)]


_Form = tuple[dict[Language, tuple[str, str]], list[str]]
_FORMS: Final[tuple[Callable[[Language, Generator], _Form], ...]] = (
    lambda language, rng: (_CAPITAL, _country(language, rng)),
    lambda language, rng: (_WHERE, _country(language, rng)),
    lambda language, rng: (_COLOUR, _thing(language, rng)),
    lambda language, rng: (_DAY, _days(language, rng)),
)
