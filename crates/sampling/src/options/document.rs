//! The tables of `docs/sampling.md`, made from the lists of steps and options. A test compares them with the file.

use crate::{OPTIONS, OptionKind, SamplingOption, StepKind};

const DOCUMENT: &str = include_str!("../../../../docs/sampling.md");

fn steps_table() -> String {
    let mut table = String::from("| step | reordered by `samplers` | what it does |\n|---|---|---|\n");
    for kind in StepKind::ALL {
        let movable = if kind.is_movable() { "yes" } else { "no" };
        table += &format!("| `{kind}` | {movable} | {} |\n", kind.summary());
    }
    table
}

fn options_table() -> String {
    let mut table =
        String::from("| field | flag | range | neutral or default | what it does |\n|---|---|---|---|---|\n");
    for option in OPTIONS {
        let (field, flag, doc) = (option.json_name(), option.flag(), option.doc());
        let needs = option.needed_option().map_or_else(String::new, |needed| match needed {
            "a penalty" => " Needs a penalty.".to_owned(),
            needed => format!(" Needs `{needed}`."),
        });
        let neutral = option.neutral().unwrap_or_else(|| "random".to_owned());
        table += &format!("| `{field}` | `--{flag}` | {} | {neutral} | {doc}{needs} |\n", range(option));
    }
    table
}

fn range(option: &SamplingOption) -> String {
    match option.kind() {
        OptionKind::Number { low, high, json_high } if high != json_high => {
            format!("{low} to {high} (JSON: {json_high})")
        }
        OptionKind::Number { low, high, .. } => format!("{low} to {high}"),
        OptionKind::Count { low } => format!("from {low}"),
        OptionKind::Seed => "64 bits (JSON: 63)".to_owned(),
        OptionKind::TokenBias { low, high, max_len } => format!("{low} to {high} for at most {max_len} tokens"),
        OptionKind::Tokens { max_len, .. } => format!("at most {max_len} tokens"),
        OptionKind::Texts { max_len, max_bytes, .. } => format!("at most {max_len} texts of {max_bytes} bytes"),
        OptionKind::Steps => "names of steps".to_owned(),
    }
}

fn assert_documented(table: &str) {
    assert!(DOCUMENT.contains(table), "docs/sampling.md differs from the code; paste this table there:\n\n{table}");
}

#[test]
fn the_steps_are_documented() {
    assert_documented(&steps_table());
}

#[test]
fn the_options_are_documented() {
    assert_documented(&options_table());
}

/// A name that occurs twice would make one option unreachable.
#[test]
fn names_and_flags_are_unique() {
    for (index, option) in OPTIONS.iter().enumerate() {
        for other in &OPTIONS[..index] {
            assert_ne!(option.param(), other.param());
            assert_ne!(option.json_name(), other.json_name());
            assert_ne!(option.flag(), other.flag());
        }
        assert!(!option.doc().is_empty() && option.doc().len() < 120, "{}: {}", option.param(), option.doc());
        assert!(
            option.needed_option().is_none_or(|name| name == "a penalty" || SamplingOption::by_param(name).is_some())
        );
    }
}
