//! Pre-tokenizers: they split a text into pieces before merging; no merge crosses a split.
//!
//! A pre-tokenizer is a list of stages, each of which splits the pieces of the stage before. The loaders call [`named`]
//! (for `tokenizer.ggml.pre` of a GGUF file) or [`Stage::from_pattern`] (for the patterns in a tokenizer.json). The
//! patterns are those of published models; nothing here knows about ids or vocabularies.

mod gguf_names;
mod pattern_scanners;
mod steps;

use crate::algorithms::pattern::Pattern;
use crate::error::Error;
pub(crate) use gguf_names::{Named, name_of, named};
pub(crate) use steps::{Behavior, Delimiter, Prepend, Step, bert_steps, run as run_steps};

/// One way to split a text. The pieces of a stage, concatenated, are its input.
#[derive(Debug, Clone)]
pub(crate) enum Stage {
    Gpt2,
    /// Llama 3, Qwen 2 and similar models; see [`pattern_scanners::words`].
    Words {
        digits: usize,
        marks: bool,
    },
    /// GPT-4o, Tekken; see [`pattern_scanners::cased`].
    Cased {
        digits: usize,
        contractions: bool,
    },
    DeepSeek3,
    /// Numbers, in pieces of at most this many characters.
    Numbers(usize),
    /// Runs of punctuation.
    Punctuation,
    /// Any other pattern: its matches and the text between them are pieces.
    Pattern(Pattern),
}

pub(crate) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|",
    r"[^\r\n\p{L}\p{N}]?\p{L}+|",
    r"\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|",
    r"\s+(?!\S)|",
    r"\s+",
);
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|",
    r"\p{N}|",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|",
    r"\s+(?!\S)|",
    r"\s+",
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|",
    r"\s*[\r\n]+|",
    r"\s+(?!\S)|",
    r"\s+",
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|",
    r"\s*[\r\n]+|",
    r"\s+(?!\S)|",
    r"\s+",
);
const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
    r##"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
    r##" ?[\p{P}\p{S}]+[\r\n]*|"##,
    r##"\s*[\r\n]+|"##,
    r##"\s+(?!\S)|"##,
    r##"\s+"##,
);

/// Letters with case, as DeepSeek-LLM lists them.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}",
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}",
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}",
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}",
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}",
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}",
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}",
    r"\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}",
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}",
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}",
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+",
);
const DEEPSEEK_PUNCTUATION: &str = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const DEEPSEEK_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const DEEPSEEK3_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";

impl PartialEq for Stage {
    /// Whether both stages have the same definition. Files spell the same pattern in different ways, so patterns are
    /// compared in compiled form.
    fn eq(&self, other: &Stage) -> bool {
        match (self, other) {
            (Stage::Gpt2, Stage::Gpt2)
            | (Stage::DeepSeek3, Stage::DeepSeek3)
            | (Stage::Punctuation, Stage::Punctuation) => true,
            (Stage::Words { digits: a, marks: b }, Stage::Words { digits: c, marks: d }) => (a, b) == (c, d),
            (Stage::Cased { digits: a, contractions: b }, Stage::Cased { digits: c, contractions: d }) => {
                (a, b) == (c, d)
            }
            (Stage::Numbers(a), Stage::Numbers(b)) => a == b,
            (Stage::Pattern(a), Stage::Pattern(b)) => a == b,
            _ => false,
        }
    }
}

impl Stage {
    /// Returns the stage for a pattern: its scanner if there is one, otherwise the regular expression.
    pub(crate) fn from_pattern(pattern: &str) -> Result<Stage, Error> {
        Ok(match pattern {
            GPT2 => Stage::Gpt2,
            LLAMA3 => Stage::Words { digits: 3, marks: false },
            QWEN2 => Stage::Words { digits: 1, marks: false },
            QWEN35 => Stage::Words { digits: 1, marks: true },
            TEKKEN => Stage::Cased { digits: 1, contractions: false },
            GPT4O => Stage::Cased { digits: 3, contractions: true },
            DEEPSEEK3 => Stage::DeepSeek3,
            r"\p{N}" => Stage::Numbers(1),
            r"\p{N}{1,3}" => Stage::Numbers(3),
            r"\p{N}+" => Stage::Numbers(usize::MAX),
            _ => Stage::pattern(pattern)?,
        })
    }

    fn pattern(pattern: &str) -> Result<Stage, Error> {
        Pattern::new("pre-tokenizer pattern", pattern).map(Stage::Pattern)
    }

    pub(crate) fn split<'t>(&self, text: &'t str, emit: &mut dyn FnMut(&'t str)) {
        match self {
            Stage::Gpt2 => pattern_scanners::gpt2(text, emit),
            Stage::Words { digits, marks } => pattern_scanners::words(text, *digits, *marks, emit),
            Stage::Cased { digits, contractions } => pattern_scanners::cased(text, *digits, *contractions, emit),
            Stage::DeepSeek3 => pattern_scanners::deepseek3(text, emit),
            Stage::Numbers(most) => pattern_scanners::numbers(text, *most, emit),
            Stage::Punctuation => pattern_scanners::punctuation(text, emit),
            Stage::Pattern(pattern) => split_by_pattern(pattern, text, emit),
        }
    }
}

/// Splits by a pattern. Empty matches are no pieces.
fn split_by_pattern<'t>(pattern: &Pattern, text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    let mut gap = 0;
    pattern.for_each_match(text, &mut |found| {
        if found.is_empty() {
            return;
        }
        if gap < found.start {
            emit(&text[gap..found.start]);
        }
        emit(&text[found.clone()]);
        gap = found.end;
    });
    if gap < text.len() {
        emit(&text[gap..]);
    }
}

/// Splits by all stages in turn.
pub(crate) fn split_all<'t>(stages: &[Stage], text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    match stages {
        [] => emit(text),
        [last] => last.split(text, emit),
        [first, rest @ ..] => first.split(text, &mut |piece| split_all(rest, piece, emit)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::gguf_names::known_names;
    use super::*;
    use proptest::prelude::*;

    fn pieces<'t>(stage: &Stage, text: &'t str) -> Vec<&'t str> {
        let mut out = Vec::new();
        stage.split(text, &mut |piece| out.push(piece));
        out
    }

    /// Text in which the alternatives of the patterns often meet, mixed with arbitrary Unicode.
    fn nasty_text() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            4 => "[ \t\r\n]{1,4}",
            4 => "'(s|S|ſ|t|re|RE|ve|ll|lL|d|M|x|r|l)?",
            4 => "[a-zA-Z]{1,4}",
            3 => "[0-9]{1,5}",
            3 => "[!-/:-@\\[-`{-~]{1,3}",
            2 => "[éÉßẞǅʰªא中あ가ก\u{301}\u{30a}\u{94d}\u{200d}]{1,3}",
            2 => "[\u{a0}\u{85}\u{3000}\u{2028}\u{0}\u{1c}\u{feff}½Ⅷ²٣€☃😀]{1,3}",
            2 => any::<char>().prop_map(String::from),
        ];
        prop::collection::vec(piece, 0..24).prop_map(|parts| parts.concat())
    }

    /// Compiled once: compiling takes longer than all the cases.
    fn scanners_and_patterns() -> &'static [(&'static str, Stage, Stage)] {
        static ALL: OnceLock<Vec<(&str, Stage, Stage)>> = OnceLock::new();
        ALL.get_or_init(|| {
            let patterns = [GPT2, LLAMA3, QWEN2, QWEN35, TEKKEN, GPT4O, DEEPSEEK3, r"\p{N}", r"\p{N}{1,3}", r"\p{N}+"];
            let mut all: Vec<_> = patterns
                .iter()
                .map(|&pattern| (pattern, Stage::from_pattern(pattern).unwrap(), Stage::pattern(pattern).unwrap()))
                .collect();
            assert!(all.iter().all(|(_, scanner, _)| !matches!(scanner, Stage::Pattern(_))), "each has a scanner");
            let punctuation = r"(?:[[:punct:]]|\p{P})+";
            all.push((punctuation, Stage::Punctuation, Stage::pattern(punctuation).unwrap()));
            all
        })
    }

    fn all_named() -> &'static [(&'static str, Named)] {
        static ALL: OnceLock<Vec<(&str, Named)>> = OnceLock::new();
        ALL.get_or_init(|| known_names().map(|name| (name, named(name).unwrap())).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        /// Every scanner splits exactly like its pattern.
        #[test]
        fn scanners_agree_with_their_patterns(text in nasty_text()) {
            for (pattern, scanner, oracle) in scanners_and_patterns() {
                prop_assert_eq!(pieces(scanner, &text), pieces(oracle, &text), "pattern {}", pattern);
            }
        }

        /// No pre-tokenizer loses or repeats a byte.
        #[test]
        fn pieces_cover_the_text(text in nasty_text()) {
            for (name, named) in all_named() {
                let mut joined = String::new();
                split_all(&named.stages, &text, &mut |piece| joined.push_str(piece));
                prop_assert_eq!(&joined, &text, "{}", name);
            }
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = named("gpt-9").unwrap_err().to_string();
        assert!(error.contains("gpt-9") && error.contains("llama-bpe") && error.contains("qwen2"), "{error}");
    }

    /// Splits 200 kB of each shape that made a backtracking engine slow. A stage of quadratic cost would take hours.
    #[test]
    fn long_texts_are_split_in_linear_time() {
        let shapes = ["a", " ", "0", ".", "\n", "中", "\u{301}", " \n", "a1. ", "A", "'", "'l", "aA", "ʰ", "\t ", "\r"];
        for (name, named) in all_named() {
            for shape in shapes {
                let text = shape.repeat(200_000 / shape.len()) + "x";
                let mut len = 0;
                split_all(&named.stages, &text, &mut |piece| len += piece.len());
                assert_eq!(len, text.len(), "{name} on repeated {shape:?}");
            }
        }
    }

    #[test]
    fn long_white_space_is_split_in_linear_time() {
        let text = " ".repeat(2_000_000) + "x";
        for pattern in [GPT2, LLAMA3, GPT4O, DEEPSEEK3] {
            assert_eq!(pieces(&Stage::from_pattern(pattern).unwrap(), &text).len(), 2);
        }
    }
}
