//! Beam search against the sequences and scores of the reference implementation.

use pellucid_engine::{BeamParams, EarlyStopping, Engine, EngineOptions, Overcommit, Request};
use pellucid_model::{Decoder, LoadOptions};
use pellucid_sampling::SamplingParams;
use pellucid_selftest::{EventCollector, goldens_folder};
use pellucid_tensor::DType;
use pellucid_testing::{cpu, exact_isa};
use serde_json::Value;

/// Scores are sums of up to 12 log probabilities; the reference's own f32 and f64 runs differ by up to 1e-4.
const TOLERANCE: f64 = 2e-4;

fn engine(model: &str) -> Engine {
    let backend = cpu(exact_isa(), 2).expect("an available instruction set");
    let checkpoint = pellucid_checkpoint::Checkpoint::open(&goldens_folder().join(model)).expect("a golden");
    let model = Decoder::load(&checkpoint, backend.clone(), LoadOptions::default(), &mut |_, _| ()).expect("it loads");
    let options = EngineOptions {
        num_blocks: 64,
        block_len: 4,
        kv_dtype: DType::F32,
        max_sequences: 8,
        step_tokens: 32,
        chunk_len: 16,
        max_waiting: 8,
        overcommit: Overcommit::Never,
        secret: [1; 32],
        snapshot_distance: None,
    };
    Engine::new(Box::new(model), backend, options).expect("an engine")
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("a list of ids")
}

#[test]
fn sequences_and_scores_are_the_references() {
    let file = goldens_folder().with_file_name("beams.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(file).expect("a fixture")).expect("valid JSON");
    let records = golden["records"].as_array().or(golden.as_array()).expect("a list of records");
    let mut engines: std::collections::HashMap<String, Engine> = Default::default();
    for (i, record) in records.iter().enumerate() {
        let name = record["model"].as_str().expect("a model");
        let engine = engines.entry(name.to_owned()).or_insert_with(|| engine(name));
        let beams = BeamParams {
            width: record["num_beams"].as_u64().expect("a width") as usize,
            num_returned: record["num_return_sequences"].as_u64().expect("a number") as usize,
            length_penalty: record["length_penalty"].as_f64().expect("a penalty") as f32,
            early_stopping: match &record["early_stopping"] {
                Value::Bool(true) => EarlyStopping::Always,
                Value::Bool(false) => EarlyStopping::Heuristic,
                _ => EarlyStopping::Never,
            },
        };
        let sampling = SamplingParams { end_ids: ids(&record["eos_token_ids"]), ..SamplingParams::default() };
        let request = Request {
            beams: Some(beams),
            max_tokens: record["max_new_tokens"].as_u64().map(|tokens| tokens as usize),
            ..Request::new(ids(&record["prompt"]), sampling)
        };
        let collected = EventCollector::default();
        engine.submit(request, Box::new(collected.clone())).expect("an accepted request");
        while engine.step() {
            engine.audit().expect("consistent accounts of blocks");
        }
        let outcome = collected.outcome();
        assert_eq!(outcome.error, None, "record {i}");
        let found: Vec<Vec<u32>> = outcome.beams.iter().map(|beam| beam.ids.clone()).collect();
        let expected: Vec<Vec<u32>> = record["sequences"].as_array().expect("sequences").iter().map(ids).collect();
        assert_eq!(found, expected, "record {i}: {name}, {beams:?}");
        for (beam, score) in outcome.beams.iter().zip(record["sequences_scores"].as_array().expect("scores")) {
            let expected = score.as_f64().expect("a score");
            assert!((beam.score - expected).abs() < TOLERANCE, "record {i}: score {} for {expected}", beam.score);
        }
        assert_eq!(engine.stats().blocks_in_use, 0, "every block was released");
    }
    assert!(records.len() > 50, "only {} records", records.len());
}
