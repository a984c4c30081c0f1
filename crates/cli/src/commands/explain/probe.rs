//! `explain --layers` and `--attention`: one token of the reply, looked at from inside the model.

use pellucid_engine::{AttentionMap, AttentionProbe, Probe, ProbeRequest};
use pellucid_sampling::{Logprobs, MAX_LOGPROBS};
use pellucid_tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::json::text_of;
use crate::flags::usage_error::UsageError;
use crate::terminal::cells::{Ink, Paint, bar, beginning, left_aligned, right_aligned, share, visible};

/// Width of a token's name.
const NAME: usize = 22;
/// Width of a probability.
const SHARE: usize = 9;
const BAR: usize = 24;

/// Flags that show the inside of the model.
#[derive(Debug, clap::Args)]
pub(crate) struct ProbeArgs {
    /// Show the most probable tokens after each layer of the model: how the
    /// guess for a token takes shape
    #[arg(long, verbatim_doc_comment)]
    layers: bool,

    /// Show which earlier tokens a layer's attention looks at, by its number
    /// from 0, and of one head or the mean of all
    #[arg(long, verbatim_doc_comment, value_name = "LAYER[.HEAD]", value_parser = layer_and_head)]
    attention: Option<(usize, Option<usize>)>,

    /// Token of the reply that --layers and --attention look into, from 1
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    token: u32,
}

/// Parses `LAYER` or `LAYER.HEAD`.
fn layer_and_head(text: &str) -> Result<(usize, Option<usize>), String> {
    let number =
        |part: &str| part.parse().map_err(|_| format!("expected LAYER or LAYER.HEAD, such as 3.0, found {text}"));
    match text.split_once('.') {
        Some((layer, head)) => Ok((number(layer)?, Some(number(head)?))),
        None => Ok((number(text)?, None)),
    }
}

/// Tells a refused probe in terms of the flags, which count tokens from 1.
pub(super) fn in_flags(error: pellucid_engine::Error) -> anyhow::Error {
    use pellucid_engine::Error::OutOfRange;
    let OutOfRange { name, expected, found } = &error else { return error.into() };
    UsageError::because(match *name {
        "probe.token" => {
            let from_one = |number: &str| number.parse::<usize>().map_or(number.into(), |n| (n + 1).to_string());
            let last = expected.rsplit(' ').next().unwrap_or_default();
            format!("--token: expected 1 to {}, found {}", from_one(last), from_one(found))
        }
        "probe.attention.layer" => format!("--attention: expected a layer from {expected}, found {found}"),
        "probe.attention.head" => format!("--attention: expected a head from {expected}, found {found}"),
        "probe" => format!("--layers and --attention: expected {expected}, found {found}"),
        _ => return error.into(),
    })
}

impl ProbeArgs {
    /// Returns the probe of the request, which reports `num_top` tokens after each layer.
    pub(crate) fn request(&self, num_top: u32) -> Option<ProbeRequest> {
        let attention = self.attention.map(|(layer, head)| AttentionProbe { layer, head, rows: 1 });
        (self.layers || attention.is_some()).then(|| ProbeRequest {
            token: self.token as usize - 1,
            layers: self.layers.then_some(num_top.min(MAX_LOGPROBS)),
            attention,
        })
    }
}

/// Returns the probe for programs.
pub(super) fn json(tokenizer: &Tokenizer, probe: &Probe) -> Value {
    let text = |id: u32| text_of(tokenizer, id);
    let layer = |(layer, found): (usize, &Logprobs)| {
        let top = found.top.iter().map(|&(id, logprob)| json!({ "id": id, "text": text(id), "logprob": logprob }));
        json!({ "layer": layer, "logprob": found.chosen, "top": top.collect::<Vec<_>>() })
    };
    let map = |map: &AttentionMap| {
        let tokens: Vec<Value> = map.ids.iter().map(|&id| json!({ "id": id, "text": text(id) })).collect();
        json!({ "layer": map.of.layer, "head": map.of.head, "tokens": tokens, "weights": map.weights.last() })
    };
    json!({
        "type": "probe",
        "index": probe.token,
        "position": probe.position,
        "id": probe.id,
        "text": text(probe.id),
        "layers": probe.layers.iter().enumerate().map(layer).collect::<Vec<_>>(),
        "attention": probe.attention.as_ref().map(map),
    })
}

/// Returns the probe for people.
pub(super) fn text(tokenizer: &Tokenizer, probe: &Probe, num_rows: usize, paint: Paint) -> String {
    let name = |id: u32| {
        let bytes = tokenizer.token(id).map(|token| token.bytes.into_owned()).unwrap_or_default();
        left_aligned(&beginning(&visible(&bytes), NAME - 2), NAME)
    };
    let mut lines = Vec::new();
    if !probe.layers.is_empty() {
        lines.push(format!("   layers: the guess after each layer, and the chance of {}", name(probe.id).trim_end()));
        let layer = |(layer, found): (usize, &Logprobs)| {
            let (id, logprob) = found.top.first().copied().unwrap_or((probe.id, found.chosen));
            let chance = f64::from(found.chosen).exp();
            let ink = if id == probe.id { Ink::Winner } else { Ink::Plain };
            let guess = paint.ink(ink, &format!("{}{}", name(id), percent(f64::from(logprob).exp())));
            let line =
                format!("   {layer:>3}  {guess}  {}  {}", percent(chance), paint.ink(Ink::After, &bar(chance, BAR)));
            line.trim_end().to_owned()
        };
        lines.extend(probe.layers.iter().enumerate().map(layer));
        lines.push(String::new());
    }
    if let Some(map) = &probe.attention {
        lines.extend(attention_lines(map, &name, num_rows, paint));
        lines.push(String::new());
    }
    lines.into_iter().map(|line| line + "\n").collect()
}

/// Returns a line for each of the `num_rows` positions with the largest weights, in the order of the text.
fn attention_lines(map: &AttentionMap, name: &dyn Fn(u32) -> String, num_rows: usize, paint: Paint) -> Vec<String> {
    let weights = map.weights.last().map_or(&[][..], Vec::as_slice);
    let head = map.of.head.map_or("mean of all heads".to_owned(), |head| format!("head {head}"));
    let mut lines = vec![format!("   attention of layer {}, {head}: where this position looks", map.of.layer)];
    let mut largest: Vec<usize> = (0..weights.len()).collect();
    largest.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
    largest.truncate(num_rows);
    let shown: f32 = largest.iter().map(|&position| weights[position]).sum();
    largest.sort_unstable();
    for &position in &largest {
        let weight = f64::from(weights[position]);
        let bar = paint.ink(Ink::After, &bar(weight, BAR));
        lines.push(
            format!("   {position:>5}  {}{}  {bar}", name(map.ids[position]), percent(weight)).trim_end().to_owned(),
        );
    }
    if largest.len() < weights.len() {
        let rest = weights.iter().sum::<f32>() - shown;
        let line =
            format!("   {} other positions {}", weights.len() - largest.len(), percent(f64::from(rest)).trim_start());
        lines.push(paint.ink(Ink::Faint, &line));
    }
    lines
}

fn percent(probability: f64) -> String {
    right_aligned(&share(probability.max(0.0)), SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_may_have_a_head() {
        assert_eq!(layer_and_head("3"), Ok((3, None)));
        assert_eq!(layer_and_head("3.12"), Ok((3, Some(12))));
        for wrong in ["", ".", "3.", ".1", "a", "-1", "1.2.3"] {
            assert!(layer_and_head(wrong).is_err(), "{wrong:?}");
        }
    }
}
