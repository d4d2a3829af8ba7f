"""Train the byte-level BPE tokenizer on the training side of the mixture and write its two files.

Four cuts before merging keep a small model's life simple: every digit is a token, every Chinese character
stands alone, and a capitalised word never swallows the space before it, so a name has the same tokens after
a space as after a quote. All other words take their space with them.

    python tools/embedded_model/train_tokenizer.py quire/embedded
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from chat_format import MARKERS, SPECIALS
from draw import Draw
from mixture import document
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
SEED = 20261121
CUTS = (
    r"\p{Han}"
    r"|\p{N}"
    r"|'(?:[stmd]|re|ve|ll)(?!\p{L})"
    r"|\p{Lu}[\p{Lu}\p{Ll}\p{M}]*"
    r"|[ _]?[\p{Ll}\p{M}]+"
    r"|_?\p{L}"
    r"| ?[^\s\p{L}\p{N}_]+"
    r"|_+"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# Frequent Chinese characters, so that everyday text is one token a character.
HAN = """的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然
家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此已
工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老
给世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活尔更别打女变四神总何电数安少报才结反受目太量再
感建务做接必场件计管期市直德资命山金指克许统区保至队形社便空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路
记南品住告类求据程北边死张该交规万取拉格望觉术领共确传师观清今切院让识候带导争运笑飞风步改收根干造言联持组每济车亲极林服快办议
往元英士证近失转夫令准布始怎呢存未远叫台单影具罗字爱击流备兵连调深商算质团集百需价花党华城石级整府离况亚请技际约示复病息究线似
官火断精满支视消越器容照须九增研写称企八功吗包片史委乎查轻易早曾除农找装广显吧阿李标谈吃图念六引历首医局突专费号尽另周较注语
首都哪里请谢您再见晚早午好春夏秋冬雨雪星期零七点半钟钱店买卖饭茶水果苹鱼肉菜狗猫鸟花草树叶河湖海洋岛桥船票站床桌椅灯窗房间厨
爸妈哥姐弟妹朋友校课考试题答案笔纸词句读音乐歌舞画球游戏赢输快乐悲伤累饿渴冷热暖凉红黄蓝绿黑紫灰粉甜苦辣酸咸忙闲懒聪笨美丽帅胖瘦
""".replace("\n", "")


def corpus(count: int) -> Iterator[str]:
    d = Draw(SEED)
    for _ in range(count):
        prompt, answer = document(d)
        yield prompt
        yield answer
    for char in HAN:
        yield from [char] * 500


def train(count: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUTS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = [*SPECIALS, *MARKERS]
    added = [AddedToken(n, special=n in SPECIALS, normalized=False) for n in names]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(count), trainer)
    return tokenizer


def unmark(text: str) -> str:
    """The trainer marks all its added tokens special; think and tool marks must survive decoding."""
    spec = json.loads(text)
    for entry in spec["added_tokens"]:
        entry["special"] = entry["content"] in SPECIALS
    return json.dumps(spec, ensure_ascii=False, indent=None, separators=(",", ":"))


def config(template: str) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(SPECIALS[1:]),
        "chat_template": template,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=150_000)
    args = parser.parse_args()
    tokenizer = train(args.documents)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "tokenizer.json").write_text(unmark(tokenizer.to_str()), encoding="utf-8")
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    text = json.dumps(config(template), ensure_ascii=False, indent=1) + "\n"
    (args.folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    print(tokenizer.get_vocab_size(), "entries")


if __name__ == "__main__":
    main()
