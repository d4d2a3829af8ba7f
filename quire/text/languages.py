"""Languages of Whisper: the codes of its tokens, and the names that OpenAI's API shows."""

from __future__ import annotations

_NAMES = """
af afrikaans|am amharic|ar arabic|as assamese|az azerbaijani|ba bashkir|be belarusian|bg bulgarian
bn bengali|bo tibetan|br breton|bs bosnian|ca catalan|cs czech|cy welsh|da danish|de german|el greek
en english|es spanish|et estonian|eu basque|fa persian|fi finnish|fo faroese|fr french|gl galician
gu gujarati|ha hausa|haw hawaiian|he hebrew|hi hindi|hr croatian|ht haitian creole|hu hungarian
hy armenian|id indonesian|is icelandic|it italian|ja japanese|jw javanese|ka georgian|kk kazakh
km khmer|kn kannada|ko korean|la latin|lb luxembourgish|ln lingala|lo lao|lt lithuanian|lv latvian
mg malagasy|mi maori|mk macedonian|ml malayalam|mn mongolian|mr marathi|ms malay|mt maltese
my myanmar|ne nepali|nl dutch|nn nynorsk|no norwegian|oc occitan|pa punjabi|pl polish|ps pashto
pt portuguese|ro romanian|ru russian|sa sanskrit|sd sindhi|si sinhala|sk slovak|sl slovenian
sn shona
so somali|sq albanian|sr serbian|su sundanese|sv swedish|sw swahili|ta tamil|te telugu|tg tajik
th thai|tk turkmen|tl tagalog|tr turkish|tt tatar|uk ukrainian|ur urdu|uz uzbek|vi vietnamese
yi yiddish|yo yoruba|yue cantonese|zh chinese
"""
LANGUAGE_NAMES = dict(entry.split(" ", 1) for entry in _NAMES.strip().replace("\n", "|").split("|"))
"""Code -> English name, in lower case."""
_CODES = {name: code for code, name in LANGUAGE_NAMES.items()}


def language_code(given: str) -> str:
    """Return the code of a language that is given as a code, also with a region, or as a name."""
    text = given.strip().lower()
    return _CODES.get(text) or text.partition("-")[0]
