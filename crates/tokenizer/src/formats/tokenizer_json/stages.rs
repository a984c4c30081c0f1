//! The stages of a tokenizer.json around the model: normalizer, pre-tokenizer, post-processor, decoder.
//!
//! Pre-tokenizers of well-known models become stages with a scanner; any other list becomes general steps.

use serde_json::Value;

use super::wrong;
use crate::algorithms::normalize::{CharacterMap, MAX_GROWTH, Normalizer, Rewrite};
use crate::algorithms::pattern::Pattern;
use crate::algorithms::pipeline::{PreTokenizer, SpaceRule};
use crate::algorithms::pretokenize::{Behavior, Delimiter, GPT2, Prepend, Stage, Step, bert_steps};
use crate::algorithms::reference_classes::{nonspacing_marks, punctuation};
use crate::error::Error;
use crate::tokenizer::{LeadingSpace, NamedIds};
use crate::vocabulary::{METASPACE, Vocabulary};

/// Returns the steps of a stage: those of a `Sequence` under `key`, flattened, or the stage itself; none for null.
pub(super) fn flatten<'v>(part: &'v Value, key: &str) -> Vec<&'v Value> {
    match part["type"].as_str() {
        None if part.is_null() => Vec::new(),
        Some("Sequence") => part[key].as_array().into_iter().flatten().flat_map(|inner| flatten(inner, key)).collect(),
        _ => vec![part],
    }
}

/// Maximum steps of a normalizer or a pre-tokenizer. Known files have at most 6; each takes time for every text, and
/// stack.
const MAX_STEPS: usize = 64;

fn listed_steps<'v>(part: &'v Value, name: &str, key: &str) -> Result<Vec<&'v Value>, Error> {
    let steps = flatten(part, key);
    if steps.len() > MAX_STEPS {
        let expected = format!("at most {MAX_STEPS} steps");
        return Err(Error::invalid(format!("tokenizer.json: {name}"), expected, steps.len()));
    }
    Ok(steps)
}

pub(super) fn normalizer(part: &Value) -> Result<Normalizer, Error> {
    let mut rewrites = Vec::new();
    let mut total_growth = 1;
    for step in listed_steps(part, "normalizer", "normalizers")? {
        total_growth = growth(step).saturating_mul(total_growth);
        if total_growth > MAX_GROWTH {
            let expected = format!("replacements that lengthen a text by at most a factor of {MAX_GROWTH}");
            return Err(wrong("normalizer", &expected, step));
        }
        let flag = |name: &str| match step[name].as_bool() {
            Some(flag) => Ok(flag),
            None => Err(wrong(&format!("normalizer.{name}"), "true or false", &step[name])),
        };
        match step["type"].as_str() {
            Some("NFC") => rewrites.push(Rewrite::Nfc),
            Some("NFD") => rewrites.push(Rewrite::Nfd),
            Some("NFKC") => rewrites.push(Rewrite::Nfkc),
            Some("NFKD") => rewrites.push(Rewrite::Nfkd),
            Some("Lowercase") => rewrites.push(Rewrite::Lowercase),
            Some("StripAccents") => rewrites.push(Rewrite::RemoveMarks),
            Some("Strip") => {
                rewrites.push(Rewrite::Strip { left: flag("strip_left")?, right: flag("strip_right")? });
            }
            Some("Nmt") => rewrites.push(Rewrite::Nmt),
            Some("Precompiled") => {
                let map = CharacterMap::new(step["precompiled_charsmap"].as_str().unwrap_or_default());
                let key = "tokenizer.json: normalizer.precompiled_charsmap";
                let map = map.map_err(|reason| Error::invalid(key, "a valid character map", reason))?;
                rewrites.push(Rewrite::Map(map));
            }
            Some("Prepend") => match step["prepend"].as_str() {
                Some(text) => rewrites.push(Rewrite::Prepend(text.to_owned())),
                None => return Err(wrong("normalizer.prepend", "a string", &step["prepend"])),
            },
            Some("Replace") => rewrites.push(replacement(step)?),
            Some("BertNormalizer" | "Bert") => {
                let lowercase = flag("lowercase")?;
                let strips_accents = step["strip_accents"].as_bool().unwrap_or(lowercase);
                rewrites.extend(flag("clean_text")?.then_some(Rewrite::CleanText));
                rewrites.extend(flag("handle_chinese_chars")?.then_some(Rewrite::SpaceChinese));
                if strips_accents {
                    rewrites.extend([Rewrite::Nfd, Rewrite::Remove(nonspacing_marks())]);
                }
                rewrites.extend(lowercase.then_some(Rewrite::Lowercase));
            }
            Some("ByteLevel") => return Err(wrong("normalizer", "no ByteLevel (it belongs to pre_tokenizer)", step)),
            _ => return Err(wrong("normalizer", "a known normalizer", step)),
        }
    }
    Ok(Normalizer { rewrites })
}

fn replacement(step: &Value) -> Result<Rewrite, Error> {
    let Some(to) = step["content"].as_str() else {
        return Err(wrong("normalizer.content", "a string", &step["content"]));
    };
    let to = to.to_owned();
    let pattern = &step["pattern"];
    match (pattern["String"].as_str(), pattern["Regex"].as_str()) {
        (Some(from), _) => Ok(Rewrite::Replace { from: from.to_owned(), to }),
        (_, Some(text)) => {
            Ok(Rewrite::ReplacePattern { pattern: Pattern::new("tokenizer.json: normalizer pattern", text)?, to })
        }
        _ => Err(wrong("normalizer.pattern", "a String or a Regex", pattern)),
    }
}

/// Returns the maximum factor by which a step lengthens a text. A `Prepend` adds to a text only once, and the steps
/// that the reference defines itself lengthen it by a small factor.
fn growth(step: &Value) -> usize {
    let len = |value: &Value| value.as_str().map_or(0, str::len);
    match step["type"].as_str() {
        Some("Prepend") => 1 + len(&step["prepend"]) / MAX_PREFIX,
        Some("Replace") => match len(&step["pattern"]["String"]) {
            // A regular expression or an empty string may match before each character and after the last.
            0 => len(&step["content"]) + 1,
            from => len(&step["content"]).div_ceil(from).max(1),
        },
        // `charsmap_check` bounds each replacement.
        Some("Precompiled") => 8,
        _ => 1,
    }
}

/// Maximum bytes of a `Prepend` that count as no growth.
const MAX_PREFIX: usize = 256;

pub(super) struct Cuts {
    pub(super) cuts: PreTokenizer,
    pub(super) byte_level: bool,
}

pub(super) fn pre_tokenizer(part: &Value, normalizer: &Value) -> Result<Cuts, Error> {
    let steps = listed_steps(part, "pre_tokenizer", "pretokenizers")?;
    let byte_level = steps.iter().any(|step| step["type"] == "ByteLevel");
    if let Some(cuts) = recognize(&steps, normalizer)? {
        return Ok(Cuts { cuts, byte_level });
    }
    let mut general = Vec::new();
    let mut total_growth = 1;
    for step in steps {
        let more = general_steps(step)?;
        total_growth = more.iter().fold(total_growth, |growth: usize, step| growth.saturating_mul(step.max_growth()));
        if total_growth > MAX_GROWTH {
            let expected = format!("steps that lengthen a text by at most a factor of {MAX_GROWTH}");
            return Err(wrong("pre_tokenizer", &expected, step));
        }
        general.extend(more);
    }
    Ok(Cuts { cuts: PreTokenizer::General { steps: general, spelled: byte_level }, byte_level })
}

/// Words, and runs of other characters that are not white space.
const WORDS: &str = r"\w+|[^\w\s]+";

/// Returns a pre-tokenizer of the file as steps.
pub(super) fn general_steps(step: &Value) -> Result<Vec<Step>, Error> {
    let flag = |name: &str, usual: bool| step[name].as_bool().unwrap_or(usual);
    let at = |delimiter: Delimiter, behavior: Behavior| Step::Split { delimiter, behavior, invert: false };
    let pattern = |text: &str| Pattern::new("tokenizer.json: pre_tokenizer pattern", text).map(Delimiter::Pattern);
    let behavior = |usual: Option<Behavior>| match (step["behavior"].as_str(), usual) {
        (Some(name), _) => Behavior::named(name),
        (None, usual) => usual.filter(|_| step["behavior"].is_null()),
    };
    let behavior =
        |usual| behavior(usual).ok_or_else(|| wrong("pre_tokenizer.behavior", "a known behavior", &step["behavior"]));
    let one_char = |name: &str| {
        let mut chars = step[name].as_str().unwrap_or_default().chars();
        match (chars.next(), chars.next()) {
            (Some(c), None) => Ok(c),
            _ => Err(wrong(&format!("pre_tokenizer.{name}"), "one character", &step[name])),
        }
    };
    Ok(match step["type"].as_str() {
        Some("ByteLevel") => {
            let mut steps = Vec::new();
            steps.extend(flag("add_prefix_space", true).then_some(Step::PrefixSpace));
            if flag("use_regex", true) {
                steps.push(at(pattern(GPT2)?, Behavior::Isolated));
            }
            steps.push(Step::SpellBytes);
            steps
        }
        Some("Split") => {
            let delimiter = match (step["pattern"]["String"].as_str(), step["pattern"]["Regex"].as_str()) {
                (Some(text), _) => Delimiter::Text(text.to_owned()),
                (_, Some(text)) => pattern(text)?,
                _ => return Err(wrong("pre_tokenizer.pattern", "a String or a Regex", &step["pattern"])),
            };
            vec![Step::Split { delimiter, behavior: behavior(None)?, invert: flag("invert", false) }]
        }
        Some("Whitespace") => {
            vec![Step::Split { delimiter: pattern(WORDS)?, behavior: Behavior::Removed, invert: true }]
        }
        Some("WhitespaceSplit") => vec![at(Delimiter::Class(char::is_whitespace), Behavior::Removed)],
        Some("BertPreTokenizer") => bert_steps(),
        Some("Digits") => {
            let behavior = if flag("individual_digits", false) { Behavior::Isolated } else { Behavior::Contiguous };
            vec![at(Delimiter::Class(char::is_numeric), behavior)]
        }
        Some("Punctuation") => vec![at(Delimiter::Set(punctuation()), behavior(Some(Behavior::Isolated))?)],
        Some("CharDelimiterSplit") => vec![at(Delimiter::Char(one_char("delimiter")?), Behavior::Removed)],
        Some("Metaspace") => {
            let (mark, prepend) = (one_char("replacement")?, prepend_scheme(step));
            vec![Step::Metaspace { mark, prepend, split: flag("split", true) }]
        }
        Some("UnicodeScripts") => vec![Step::Scripts],
        Some("FixedLength") => match (&step["length"], step["length"].as_u64()) {
            (Value::Null, _) => vec![Step::FixedLength(5)],
            (_, Some(length @ 1..)) => vec![Step::FixedLength(usize::try_from(length).unwrap_or(usize::MAX))],
            (found, _) => return Err(wrong("pre_tokenizer.length", "1 or more", found)),
        },
        _ => return Err(wrong("pre_tokenizer", "a known pre-tokenizer", step)),
    })
}

/// Returns the pre-tokenizer of this crate for a list of steps, or `None` if a step is unknown.
fn recognize(steps: &[&Value], normalizer: &Value) -> Result<Option<PreTokenizer>, Error> {
    let mut space = SpaceRule::Keep;
    let mut stages = Vec::new();
    let mut spelled_stages = Vec::new();
    let mut spelled = false;
    for (index, step) in steps.iter().enumerate() {
        let flag = |name: &str, usual: bool| step[name].as_bool().unwrap_or(usual);
        let stage = match step["type"].as_str() {
            Some("ByteLevel") if !spelled => {
                spelled = true;
                if flag("add_prefix_space", true) {
                    // After other steps, the space goes before every piece; only the general steps do that.
                    if index > 0 {
                        return Ok(None);
                    }
                    space = SpaceRule::Prefix;
                }
                if flag("use_regex", true) {
                    stages.push(Stage::Gpt2);
                }
                continue;
            }
            Some("Metaspace") if index == 0 => {
                if step["replacement"].as_str() != Some("▁") {
                    return Ok(None);
                }
                space = SpaceRule::Metaspace { prepend: prepend_scheme(step), split: flag("split", true) };
                continue;
            }
            Some("Split") if never_matches(step, normalizer) => continue,
            Some("Split") => match split_stage(step)? {
                Some(stage) => stage,
                None => return Ok(None),
            },
            Some("Digits") => Stage::Numbers(if flag("individual_digits", false) { 1 } else { usize::MAX }),
            Some("Punctuation") if step["behavior"] == "Contiguous" => Stage::Punctuation,
            _ => return Ok(None),
        };
        if spelled { spelled_stages.push(stage) } else { stages.push(stage) }
    }
    Ok(Some(PreTokenizer::Ours { space, stages, spelled_stages }))
}

fn prepend_scheme(step: &Value) -> Prepend {
    match (step["prepend_scheme"].as_str(), step["add_prefix_space"].as_bool()) {
        (Some("never"), _) | (None, Some(false)) => Prepend::Never,
        (Some("first"), _) => Prepend::First,
        _ => Prepend::Always,
    }
}

/// Whether a step splits at a string that the normalizer has replaced everywhere, like the space in Gemma's file.
fn never_matches(step: &Value, normalizer: &Value) -> bool {
    let Some(wanted) = step["pattern"]["String"].as_str() else { return false };
    flatten(normalizer, "normalizers").last().is_some_and(|last| {
        last["type"] == "Replace"
            && last["pattern"]["String"] == wanted
            && last["content"].as_str().is_some_and(|content| !content.contains(wanted))
    })
}

fn split_stage(step: &Value) -> Result<Option<Stage>, Error> {
    let Some(pattern) = step["pattern"]["Regex"].as_str() else { return Ok(None) };
    let stage = Stage::from_pattern(pattern)?;
    // If the matches cover the whole text, removing the text between them removes nothing.
    let covers = matches!(stage, Stage::Gpt2 | Stage::Words { .. } | Stage::Cased { .. });
    Ok(match (step["behavior"].as_str(), step["invert"].as_bool()) {
        (Some("Isolated"), Some(false) | None) => Some(stage),
        (Some("Removed"), Some(true)) if covers => Some(stage),
        _ => None,
    })
}

/// Classes of the reference library that rebuild the post-processor from `add_bos_token` and `add_eos_token`. All
/// others use that of tokenizer.json and ignore these keys.
const REBUILDING_CLASSES: [&str; 6] = [
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
];

/// Returns the ids before and after a text if tokenizer_config.json determines them; `None` if the post-processor does.
pub(super) fn configured_ends(config: &Value, named: &NamedIds) -> Option<(Vec<u32>, Vec<u32>)> {
    let class = config["tokenizer_class"].as_str()?;
    let (add_bos, add_eos) = (config["add_bos_token"].as_bool(), config["add_eos_token"].as_bool());
    if !REBUILDING_CLASSES.contains(&class) || (add_bos, add_eos) == (None, None) {
        return None;
    }
    // The defaults for an absent key are those of the class. A token that has no name cannot be added.
    let end = |add: bool, id: Option<u32>| if add { id.map(|id| vec![id]) } else { Some(Vec::new()) };
    Some((end(add_bos.unwrap_or(true), named.bos)?, end(add_eos.unwrap_or(false), named.eos)?))
}

/// Returns the ids that the post-processor adds before and after a text.
pub(super) fn post_processor(part: &Value, vocabulary: &Vocabulary) -> Result<(Vec<u32>, Vec<u32>), Error> {
    let (mut prefix, mut suffix) = (Vec::new(), Vec::new());
    let check = |id: &Value| match super::as_id(id) {
        Some(id) if (id as usize) < vocabulary.len() => Ok(id),
        _ => Err(wrong("post_processor", "ids of the vocabulary", id)),
    };
    for step in flatten(part, "processors") {
        match step["type"].as_str() {
            Some("TemplateProcessing") => {
                let mut before = true;
                for item in step["single"].as_array().into_iter().flatten() {
                    if item.get("Sequence").is_some() {
                        before = false;
                        continue;
                    }
                    let name = item["SpecialToken"]["id"].as_str().unwrap_or_default();
                    for id in step["special_tokens"][name]["ids"].as_array().into_iter().flatten() {
                        if before { prefix.push(check(id)?) } else { suffix.push(check(id)?) }
                    }
                }
            }
            Some("RobertaProcessing" | "BertProcessing") => {
                prefix.push(check(&step["cls"][1])?);
                suffix.push(check(&step["sep"][1])?);
            }
            // ByteLevel changes offsets only.
            _ => {}
        }
    }
    Ok((prefix, suffix))
}

pub(super) fn leading_space(decoder: &Value) -> LeadingSpace {
    for step in flatten(decoder, "decoders") {
        match step["type"].as_str() {
            Some("Strip") if step["content"] == " " && step["start"] == 1 => return LeadingSpace::StripOne,
            // Its `cleanup`, which joins punctuation to the word before it, is not applied: the text of a token would
            // depend on the tokens after it.
            Some("WordPiece") => return LeadingSpace::StripOne,
            Some("Metaspace")
                if step["replacement"].as_str() == Some(METASPACE.encode_utf8(&mut [0; 4]))
                    && prepend_scheme(step) != Prepend::Never =>
            {
                return LeadingSpace::DropInFirst;
            }
            _ => {}
        }
    }
    LeadingSpace::Keep
}
