//! The steps against what a widely used library leaves of random rows (made and described in the `testing` room's fixtures).

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

/// Parameters that run the given steps in the given order.
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
    for record in goldens()["differs"].as_array().unwrap() {
        let expected = ids(&record["survivors_with_ties_to_lower_ids"]);
        assert_eq!(survivor_ids(&params(&record["steps"]), &numbers(&record["logits"])), expected, "{record}");
    }
}

/// Changed logits show as ratios of probabilities: ln(p_i / p_j) is the difference of logits.
#[test]
fn changed_logits_are_the_library_s() {
    let goldens = goldens();
    for record in goldens["logits"].as_array().unwrap() {
        let logits = numbers(&goldens["rows"][record["row"].as_u64().unwrap() as usize]);
        let setting = record["step"][1].as_f64().unwrap() as f32;
        let mut params = SamplingParams::default();
        let mut prompt = Vec::new();
        if record["step"][0] == "repetition_penalty" {
            params.repetition_penalty = setting;
            prompt = ids(&record["context"]);
        } else {
            params.temperature = setting;
        }
        let left = survivors(&params, &logits, &History::new(&prompt, None), 0);
        let expected = numbers(&record["logits"]);
        for (entry, logit) in left.iter().zip(&expected) {
            let difference = (entry.1 / left[0].1).ln();
            assert!((difference - f64::from(logit - expected[0])).abs() < 2e-5, "{} token {}", record["step"], entry.0);
        }
    }
}
