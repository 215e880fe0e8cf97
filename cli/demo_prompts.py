"""The demo's 48 prompts: short questions, tasks over a paragraph, beginnings to be continued."""

from dataclasses import dataclass
from typing import Any

EDITOR = (
    "You are the editor of a village newspaper. You write plainly and kindly, in short sentences, "
    "for readers of every age. You never use more words than a thing needs, and you never make up "
    "a name, a number or a date that you were not given."
)

MILL = (
    "The mill at the river bend was built in 1742 by two brothers who had never seen one. They "
    "walked for three weeks to a town that had a mill, drew every wheel and every beam of it, and "
    "walked home again. The first winter the wheel froze; the second winter it broke; in the third "
    "year it ground its first flour, and the village ate bread of its own for the first time."
)

BRIDGE = (
    "The council met on Tuesday to decide about the old bridge. The engineer reported that two of "
    "its five arches have cracks wider than a finger, that carts heavier than two tonnes should "
    "not cross it, and that a repair would take until the end of summer. The baker asked how the "
    "farms on the other side would get their bread. The ferryman offered to carry it for nothing. "
    "After an hour the council voted, six to one, to close the bridge to carts and to keep it open "
    "for people on foot until the work begins."
)

TIDES = (
    "Tides are the slow rise and fall of the sea. They come mostly from the pull of the moon, and "
    "a little from that of the sun. The side of the earth that faces the moon is pulled a bit more "
    "than its centre, and the far side a bit less, so the water bulges on both. As the earth turns "
    "under the bulges, most coasts see two high tides and two low tides a day. When the sun and "
    "the moon stand in one line the tides are strongest; when they stand at a right angle, weakest."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt; `task` goes before `text` where both are given."""

    task: str
    text: str = ""
    max_tokens: int = 48
    system: str | None = None  # chat only
    is_chat: bool = True
    temperature: float = 0.0

    def job(self, index: int, model: str) -> dict[str, Any]:
        """The job for `POST /v1/jobs`."""
        content = f"{self.task}\n\n{self.text}" if self.text else self.task
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": index,
        }
        if not self.is_chat:
            body["prompt"] = content
            url = "/v1/completions"
        else:
            system = [{"role": "system", "content": self.system}] if self.system else []
            body["messages"] = [*system, {"role": "user", "content": content}]
            url = "/v1/chat/completions"
        return {"custom_id": f"demo-{index:02}", "url": url, "body": body}


def _ask(task: str, max_tokens: int = 48, **options: Any) -> Prompt:
    return Prompt(task=task, max_tokens=max_tokens, **options)


def _read(task: str, text: str, max_tokens: int = 64, **options: Any) -> Prompt:
    return Prompt(task=task, text=text, max_tokens=max_tokens, **options)


def _edit(task: str, text: str = "", max_tokens: int = 64) -> Prompt:
    return Prompt(task=task, text=text, max_tokens=max_tokens, system=EDITOR, temperature=0.7)


def _go_on(text: str, max_tokens: int = 48, temperature: float = 0.0) -> Prompt:
    return Prompt(task=text, max_tokens=max_tokens, is_chat=False, temperature=temperature)


PROMPTS = (
    _ask("What is the capital of France?", 24),
    _ask("Name three primary colours.", 32),
    _ask("How many days does a leap year have?", 32),
    _ask("What is the boiling point of water at sea level, in degrees Celsius?", 32),
    _ask("Which planet is known as the red planet?", 24),
    _ask("Who wrote Romeo and Juliet?", 24),
    _ask("What is 7 times 8?", 24),
    _ask("Give me a word that rhymes with light.", 16),
    _ask("What do bees make?", 32),
    _ask("Is the sun a star or a planet?", 40),
    _ask("Explain in one sentence why the sky is blue.", 64),
    _ask("What is the difference between weather and climate?", 80),
    _ask("Why do leaves fall in autumn?", 72),
    _ask("How does a bicycle stay upright?", 80),
    _ask("What is photosynthesis? Answer for a ten-year-old.", 80),
    _ask("List five things to pack for a day in the mountains.", 72),
    _ask("Write a haiku about the morning.", 40, temperature=0.8),
    _ask("Write two sentences about a lighthouse keeper.", 56, temperature=0.8),
    _ask("Suggest a name for a small bakery, and say why.", 48, temperature=0.8),
    _ask("Give three tips for sleeping well.", 80),
    _ask("Translate to French: Good morning, my friend.", 24),
    _ask("Translate to Spanish: Where is the library?", 24),
    _ask("Write a Python function that returns the larger of two numbers.", 96),
    _ask("Write a shell command that counts the lines of a file named notes.txt.", 48),
    _ask("What does the HTTP status code 404 mean?", 56),
    _ask("Explain what a queue is in computing, with an example from daily life.", 96),
    _read("Summarise this in one sentence.", MILL),
    _read("In which year was the mill built, and by whom?", MILL, 40),
    _read("What went wrong in the first two winters?", MILL, 48),
    _read("Give this story a title.", MILL, 20, temperature=0.6),
    _read("Summarise the decision for someone who was not there.", BRIDGE, 72),
    _read("Who voted against closing the bridge? If the text does not say, say so.", BRIDGE, 48),
    _read("List what the engineer reported, one point a line.", BRIDGE, 80),
    _read("Explain in your own words why there are two high tides a day.", TIDES, 96),
    _read("When are the tides strongest?", TIDES, 40),
    _read("Turn this into three facts for a quiz.", TIDES, 88),
    _edit("Write a notice: the market is on Saturday instead of Sunday this week.", max_tokens=56),
    _edit("Write a notice: a grey cat was found near the school.", max_tokens=56),
    _edit("Write a headline for this report.", BRIDGE, 24),
    _edit("Shorten this report to two sentences.", BRIDGE, 64),
    _edit("Thank the ferryman in one sentence.", BRIDGE, 40),
    _edit("Write the opening of a piece about this mill for children.", MILL, 72),
    _go_on("Once upon a time, in a village by the sea, there lived", 64, 0.8),
    _go_on("The recipe is simple. First, you", 56),
    _go_on("Dear neighbour,\n\nI am writing to ask whether", 64, 0.7),
    _go_on("def fibonacci(n):\n    ", 72),
    _go_on("The three most important inventions of the nineteenth century were", 64),
    _go_on(TIDES + "\n\nSailors know this well:", 64),
)
