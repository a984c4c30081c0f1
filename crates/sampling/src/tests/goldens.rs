//! Compares the steps with those of a widely used library on random rows. The fixtures of the crate `selftest` say how
//! they were made.

use serde_json::Value;

use super::{survivor_ids, survivors};
use crate::{History, SamplingParams, StepKind};

fn goldens() -> Value {
    serde_json::from_str(include_str!("../../../selftest/fixtures/processors.json")).unwrap()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as u32).collect()
}

/// Returns parameters that run the given steps in the given order.
fn params(steps: &Value) -> SamplingParams {
    let mut params = SamplingParams::default();
    let mut order = Vec::new();
    for step in steps.as_array().unwrap() {
        let setting = step[1].as_f64().unwrap() as f32;
        order.push(match step[0].as_str().unwrap() {
            "temperature" => {
                params.temperature = setting;
                StepKind::Temperature
            }
            "top_k" => {
                params.top_k = setting as u32;
                StepKind::TopK
            }
            "typical" => {
                params.typical_p = setting;
                StepKind::Typical
            }
            "top_p" => {
                params.top_p = setting;
                StepKind::TopP
            }
            "min_p" => {
                params.min_p = setting;
                StepKind::MinP
            }
            other => panic!("the goldens have a step {other}"),
        });
    }
    SamplingParams { samplers: Some(order), ..params }
}

#[test]
fn survivors_are_the_library_s() {
    let goldens = goldens();
    let records = goldens["survivors"].as_array().unwrap();
    assert!(records.len() > 300);
    for record in records {
        let logits = numbers(&goldens["rows"][record["row"].as_u64().unwrap() as usize]);
        let mut expected = ids(&record["survivors"]);
        expected.sort_unstable();
        assert_eq!(survivor_ids(&params(&record["steps"]), &logits), expected, "{}", record["steps"]);
    }
}

#[test]
fn ties_go_to_lower_ids_where_the_library_keeps_them_all() {
    let goldens = goldens();
    let records = goldens["differs"].as_array().unwrap();
    assert_eq!(records.len(), 3);
    for record in records {
        assert_ne!(record["survivors"], record["survivors_with_ties_to_lower_ids"], "{record}");
        let expected = ids(&record["survivors_with_ties_to_lower_ids"]);
        assert_eq!(survivor_ids(&params(&record["steps"]), &numbers(&record["logits"])), expected, "{record}");
    }
}

/// A difference of logits shows in the probabilities: ln(p_i / p_j) = logit_i - logit_j.
#[test]
fn changed_logits_are_the_library_s() {
    let goldens = goldens();
    let records = goldens["logits"].as_array().unwrap();
    for step in ["temperature", "repetition_penalty"] {
        assert_eq!(records.iter().filter(|record| record["step"][0] == step).count(), 12, "{step}");
    }
    for record in records {
        let logits = numbers(&goldens["rows"][record["row"].as_u64().unwrap() as usize]);
        let setting = record["step"][1].as_f64().unwrap() as f32;
        let mut params = SamplingParams::default();
        let mut prompt = Vec::new();
        match record["step"][0].as_str().unwrap() {
            "repetition_penalty" => {
                params.repetition_penalty = setting;
                prompt = ids(&record["context"]);
            }
            "temperature" => params.temperature = setting,
            other => panic!("the goldens have a step {other}"),
        }
        let expected = numbers(&record["logits"]);
        // Neither step drops a token, and each changes some logit.
        assert_eq!(expected.len(), logits.len(), "{}", record["step"]);
        assert_ne!(expected, logits, "{}", record["step"]);
        let left = survivors(&params, &logits, &History::new(&prompt, None), 0);
        let left_ids: Vec<u32> = left.iter().map(|entry| entry.0).collect();
        assert_eq!(left_ids, (0..logits.len() as u32).collect::<Vec<_>>(), "{}", record["step"]);
        for (entry, logit) in left.iter().zip(&expected) {
            let difference = (entry.1 / left[0].1).ln();
            assert!((difference - f64::from(logit - expected[0])).abs() < 2e-5, "{} token {}", record["step"], entry.0);
        }
    }
}
