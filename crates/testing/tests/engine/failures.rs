//! A failure ends the requests that it concerns, with an error that names it, and no others.

use pellucid_engine::{Engine, EngineOptions, Error, Request};
use pellucid_sampling::SamplingParams;
use pellucid_tensor::DType;
use pellucid_testing::{FakeModel, invariance_cases};

use crate::support::{OPTIONS, bits, engine, fake, request, serve};

/// Keys that f16 cannot hold end their request with an error; formats with the range of f32 hold them.
#[test]
fn keys_beyond_the_format_end_their_request_with_an_error() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cases = invariance_cases(folder.path());
    let model = &cases.iter().find(|case| case.name == "wide heads").expect("a model with wide heads").path;
    // Norm weights of the first layer, multiplied by a million, make keys and values beyond the range of f16.
    let file = model.join("model.safetensors");
    let mut bytes = std::fs::read(&file).expect("just written");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).expect("a header");
    let offsets = &header["model.layers.0.input_layernorm.weight"]["data_offsets"];
    let at = |i: usize| 8 + header_len + offsets[i].as_u64().expect("an offset") as usize;
    for bytes in bytes[at(0)..at(1)].chunks_exact_mut(4) {
        let value = f32::from_le_bytes(bytes[..].try_into().expect("four bytes"));
        bytes.copy_from_slice(&(value * 1e6).to_le_bytes());
    }
    std::fs::write(&file, bytes).expect("a writable file");
    let run = |kv_dtype| {
        let mut engine = engine(model, 1, EngineOptions { kv_dtype, ..OPTIONS });
        serve(&mut engine, &[request(vec![1, 2, 3], 1)])[0].error.clone()
    };
    assert!(matches!(run(DType::F16), Some(Error::Sampling(pellucid_sampling::Error::NotANumber { .. }))));
    assert_eq!((run(DType::F32), run(DType::BF16)), (None, None), "formats with the range of f32 work");
}

#[test]
fn a_kv_format_that_does_not_fit_is_rejected_by_name() {
    let refusal = |kv_dtype| {
        let model = FakeModel::new(24, 60);
        let backend = model.backend();
        let refused = Engine::new(Box::new(model), backend, EngineOptions { kv_dtype, ..OPTIONS });
        refused.err().expect("it must be rejected").to_string()
    };
    assert!(refusal(DType::Q8_0).contains("Q8_0: the head size must be a multiple of 32, but this model's is 1"));
    assert!(refusal(DType::Q4_0).contains("cannot be stored in Q4_0; supported are F32, F16, BF16, Q8_0"));
}

#[test]
fn nan_logits_end_their_request_alone() {
    let requests: Vec<Request> = (0..6).map(|i| request(vec![i, i + 1, 3], 1)).collect();
    let healthy: Vec<_> = serve(&mut fake(OPTIONS, |_| ()), &requests).iter().map(bits).collect();
    let mut with_poison = requests.clone();
    with_poison.insert(3, request(vec![1, 23, 2], 1));
    let outcomes = serve(&mut fake(OPTIONS, |model| model.poison = Some(23)), &with_poison);
    assert!(matches!(outcomes[3].error, Some(Error::Sampling(pellucid_sampling::Error::NotANumber { .. }))));
    let mut found: Vec<_> = Vec::new();
    for (i, outcome) in outcomes.iter().enumerate().filter(|(i, _)| *i != 3) {
        // Another request that sampled the poisoned token itself ends too.
        if outcome.error.is_none() {
            found.push(i);
            assert!(bits(outcome) == healthy[if i > 3 { i - 1 } else { i }], "request {i} is unchanged");
        }
    }
    assert!(!found.is_empty());
}

#[test]
fn a_panic_in_the_model_ends_that_step_and_the_engine_continues() {
    let mut engine = fake(OPTIONS, |model| model.bomb = Some(22));
    let outcome = &serve(&mut engine, &[request(vec![22], 1)])[0];
    assert!(matches!(&outcome.error, Some(Error::Internal(message)) if message.contains("bomb")), "{outcome:?}");
    let sampling = SamplingParams { banned_tokens: vec![22], temperature: 1.0, ..SamplingParams::default() };
    let after = Request { max_tokens: Some(5), ..Request::new(vec![1, 2], sampling) };
    assert_eq!(serve(&mut engine, &[after])[0].error, None);
    assert_eq!(engine.stats().blocks_in_use, 0);
}
