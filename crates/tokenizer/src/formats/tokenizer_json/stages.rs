//! The stages of a tokenizer.json around the model: normalizer, pre-tokenizer, post-processor, decoder.
//!
//! A stage whose steps are all known runs in this crate; any other runs in the `tokenizers` crate as a whole.

use serde_json::Value;
use tokenizers::{NormalizerWrapper, SplitDelimiterBehavior};

use super::{charsmap_check, wrong};
use crate::algorithms::normalize::{MAX_GROWTH, Normalizer, Rewrite, TracedRewrite};
use crate::algorithms::pattern::Pattern;
use crate::algorithms::pipeline::{ForeignStep, PreTokenizer, Prepend, SpaceRule};
use crate::algorithms::pretokenize::{GPT2, Stage};
use crate::error::Error;
use crate::tokenizer::{LeadingSpace, NamedIds};
use crate::vocabulary::{METASPACE, Vocabulary};

/// Returns the steps of a stage: those of a `Sequence` under `key`, flattened, or the stage itself; none for null.
fn flatten<'v>(part: &'v Value, key: &str) -> Vec<&'v Value> {
    match part["type"].as_str() {
        None => Vec::new(),
        Some("Sequence") => part[key].as_array().into_iter().flatten().flat_map(|inner| flatten(inner, key)).collect(),
        Some(_) => vec![part],
    }
}

pub(super) fn normalizer(part: &Value) -> Result<Normalizer, Error> {
    if part.is_null() {
        return Ok(Normalizer::default());
    }
    let mut rewrites = Vec::new();
    let mut traced = Vec::new();
    let mut total_growth = 1;
    for step in flatten(part, "normalizers") {
        total_growth = growth(step).saturating_mul(total_growth);
        if total_growth > MAX_GROWTH {
            let expected = format!("replacements that lengthen a text by at most a factor of {MAX_GROWTH}");
            return Err(wrong("normalizer", &expected, step));
        }
        if step["type"] == "Precompiled"
            && let Err(reason) = charsmap_check::check(step["precompiled_charsmap"].as_str().unwrap_or_default())
        {
            return Err(Error::invalid(
                "tokenizer.json: normalizer.precompiled_charsmap",
                "a valid character map",
                reason,
            ));
        }
        rewrites.push(match step["type"].as_str() {
            Some("NFC") => Rewrite::Nfc,
            Some("Prepend") => match step["prepend"].as_str() {
                Some(text) => Rewrite::Prepend(text.to_owned()),
                None => return Err(wrong("normalizer.prepend", "a string", &step["prepend"])),
            },
            Some("Replace") => match (step["pattern"]["String"].as_str(), step["content"].as_str()) {
                (Some(from), Some(to)) if !from.is_empty() => Rewrite::Replace { from: from.into(), to: to.into() },
                _ => match replace_pattern(step)? {
                    Some((pattern, to)) => Rewrite::ReplacePattern { pattern, to },
                    None => Rewrite::Foreign(foreign_normalizer(step)?),
                },
            },
            Some("ByteLevel") => return Err(wrong("normalizer", "no ByteLevel (it belongs to pre_tokenizer)", step)),
            _ => Rewrite::Foreign(foreign_normalizer(step)?),
        });
        traced.push(match rewrites.last() {
            Some(Rewrite::ReplacePattern { pattern, to }) => {
                TracedRewrite::ReplacePattern { pattern: pattern.clone(), to: to.clone() }
            }
            _ => TracedRewrite::Reference(foreign_normalizer(step)?),
        });
    }
    Ok(Normalizer { rewrites, traced: Some(traced) })
}

fn foreign_normalizer(step: &Value) -> Result<NormalizerWrapper, Error> {
    serde_json::from_value(step.clone())
        .map_err(|error| Error::invalid("tokenizer.json: normalizer", "a known normalizer", error))
}

/// Returns the pattern and the replacement of a `Replace` with a regular expression.
fn replace_pattern(step: &Value) -> Result<Option<(Pattern, String)>, Error> {
    let Some(pattern) = step["pattern"]["Regex"].as_str() else { return Ok(None) };
    let Some(content) = step["content"].as_str() else {
        return Err(wrong("normalizer.content", "a string", &step["content"]));
    };
    Ok(Some((Pattern::new("tokenizer.json: normalizer pattern", pattern)?, content.to_owned())))
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
    let steps = flatten(part, "pretokenizers");
    let byte_level = steps.iter().any(|step| step["type"] == "ByteLevel");
    // The `tokenizers` crate divides by this length.
    if let Some(step) = steps.iter().find(|step| step["type"] == "FixedLength" && step["length"] == 0) {
        return Err(wrong("pre_tokenizer.length", "1 or more", &step["length"]));
    }
    if let Some(cuts) = recognize(&steps, normalizer)? {
        return Ok(Cuts { cuts, byte_level });
    }
    let steps = steps.iter().map(|step| foreign_steps(step)).collect::<Result<Vec<_>, _>>()?;
    let cuts = PreTokenizer::Foreign { steps: steps.into_iter().flatten().collect(), spelled: byte_level };
    Ok(Cuts { cuts, byte_level })
}

/// Returns a step as the `tokenizers` crate runs it, with a pattern of this crate in place of its own.
fn foreign_steps(step: &Value) -> Result<Vec<ForeignStep>, Error> {
    let reference = |step: &Value| -> Result<ForeignStep, Error> {
        let parsed = serde_json::from_value(step.clone());
        let parsed =
            parsed.map_err(|error| Error::invalid("tokenizer.json: pre_tokenizer", "a known pre-tokenizer", error))?;
        Ok(ForeignStep::Reference(Box::new(parsed)))
    };
    match (step["type"].as_str(), step["pattern"]["Regex"].as_str()) {
        (Some("Split"), Some(pattern)) => {
            let pattern = Pattern::new("tokenizer.json: pre_tokenizer pattern", pattern)?;
            let Ok(behavior) = serde_json::from_value::<SplitDelimiterBehavior>(step["behavior"].clone()) else {
                return Err(wrong("pre_tokenizer.behavior", "a known behavior", &step["behavior"]));
            };
            let invert = step["invert"].as_bool().unwrap_or(false);
            Ok(vec![ForeignStep::Split { pattern, behavior, invert }])
        }
        (Some("ByteLevel"), _) if step["use_regex"].as_bool().unwrap_or(true) => {
            let prefix = step["add_prefix_space"].as_bool().unwrap_or(true);
            let pattern = Pattern::new("pre-tokenizer pattern", GPT2)?;
            let mut bytes_only = step.clone();
            bytes_only["use_regex"] = false.into();
            bytes_only["add_prefix_space"] = false.into();
            Ok(vec![ForeignStep::PrefixAndSplit { prefix, pattern }, reference(&bytes_only)?])
        }
        _ => Ok(vec![reference(step)?]),
    }
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
                    // After other steps, the space goes before every piece; only the `tokenizers` crate does that.
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
