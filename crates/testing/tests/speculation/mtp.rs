//! Layers of a model that predict further tokens: random ones, which are mostly wrong, and one that is mostly right.

use std::sync::Arc;

use pellucid_checkpoint::{Checkpoint, Metadata, NewTensor, Source};
use pellucid_cpu::{CpuBackend, Isa};
use pellucid_engine::{DraftCounts, DrafterKind, Engine, EngineOptions, Overcommit, Request, SpeculationOptions};
use pellucid_model::{Decoder, LoadOptions};
use pellucid_sampling::SamplingParams;
use pellucid_selftest::goldens_folder;
use pellucid_tensor::{DType, SharedBytes};
use pellucid_testing::cpu;

use crate::support::{OPTIONS, SharedModel, assert_same, fixed, prompts, replies, request, serve};

const WITH_PREDICTOR: LoadOptions = LoadOptions { context_len: None, predictor: true };

fn golden(name: &str) -> Checkpoint {
    let folder = goldens_folder().with_file_name("predictors").join(name);
    Checkpoint::open(&folder.join("model.gguf")).expect("a golden")
}

fn load(checkpoint: &Checkpoint, backend: &Arc<CpuBackend>) -> SharedModel {
    let loaded = Decoder::load(checkpoint, backend.clone(), WITH_PREDICTOR, &mut |_, _| ());
    SharedModel::new(loaded.expect("it loads"))
}

/// Serves requests without and with drafts of the predictor, compares the replies, and returns the counts.
fn compare(name: &str, engine: &dyn Fn() -> Engine, requests: &[Request], len: Option<usize>) -> DraftCounts {
    let expected = replies(&serve(&mut engine(), requests));
    let mut drafting = engine();
    let options = len.map_or(SpeculationOptions::OFF, fixed);
    drafting.set_speculation(SpeculationOptions { mtp: true, ..options });
    assert_same(name, &replies(&serve(&mut drafting, requests)), &expected);
    drafting.stats().speculation.of(DrafterKind::Mtp)
}

#[test]
fn a_predictor_changes_no_reply() {
    for name in ["glm4-moe", "qwen3-next"] {
        let backend = cpu(Isa::best(), 2).expect("the best instruction set is available");
        let model = load(&golden(name), &backend);
        let requests: Vec<Request> = prompts(40, 90, 1).into_iter().zip(0..).map(|(p, i)| request(p, i)).collect();
        let settings = [
            ("F32", OPTIONS),
            ("F16, chunks of 3", EngineOptions { kv_dtype: DType::F16, chunk_len: 3, ..OPTIONS }),
            // Little memory: requests are preempted, and find their prefixes.
            (
                "preempted",
                EngineOptions {
                    num_blocks: 24,
                    max_sequences: 6,
                    overcommit: Overcommit::Unbounded { growth: 4 },
                    ..OPTIONS
                },
            ),
        ];
        for (what, options) in settings {
            let engine = || Engine::new(model.share(), backend.clone(), options).expect("an engine");
            for len in [Some(1), Some(4), None] {
                let counts = compare(&format!("{name}, {what}, drafts of {len:?}"), &engine, &requests, len);
                assert!(len.is_none() || counts.drafted > 100, "{name}, {what}: {counts:?}");
            }
        }
        // Several choices of a request share the blocks of its prompt; they are copied with the rows of the layer.
        let engine = || Engine::new(model.share(), backend.clone(), OPTIONS).expect("an engine");
        let choices = |request: Request| Request { num_choices: 3, best_of: 3, ..request };
        let requests: Vec<Request> = requests.into_iter().take(8).map(choices).collect();
        compare(&format!("{name}, three choices"), &engine, &requests, Some(3));
        let mut unchecked = engine();
        unchecked.set_speculation(SpeculationOptions { mtp: true, ..fixed(3) });
        unchecked.trust_drafts();
        let expected = replies(&serve(&mut engine(), &requests));
        assert!(replies(&serve(&mut unchecked, &requests)) != expected, "the comparison must notice unchecked drafts");
    }
}

/// Returns a model whose layers add nothing, so that each token depends on the one before it alone, with a predictor
/// that computes the same function of it.
fn bigram_model() -> Checkpoint {
    let checkpoint = golden("glm4-moe");
    let Source::Gguf(metadata) = checkpoint.source() else { panic!("a GGUF file") };
    let mut keys = Metadata::default();
    for (key, value) in metadata.iter() {
        assert!(keys.insert(key.to_owned(), value.clone()), "keys are unique");
    }
    let bytes = |name: &str| checkpoint.tensor(name).expect("a tensor").bytes().to_vec();
    let tensors = checkpoint.tensors().iter().map(|info| {
        let (name, hidden) = (info.name.as_str(), info.shape[0]);
        let adds = ["attn_output.weight", "ffn_down"].iter().any(|part| name.contains(part));
        let values: Option<Vec<f32>> = match name {
            _ if adds => Some(vec![0.0; info.num_elements()]),
            "blk.3.nextn.enorm.weight" => Some(vec![1.0; hidden]),
            // The embedding's half is the identity.
            "blk.3.nextn.eh_proj.weight" => {
                let value = |i: usize| f32::from(u8::from(i / (2 * hidden) == i % (2 * hidden)));
                Some((0..info.num_elements()).map(value).collect())
            }
            _ => None,
        };
        let (dtype, bytes): (DType, Vec<u8>) = match values {
            Some(values) => (DType::F32, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            None if name == "blk.3.nextn.shared_head_norm.weight" => (info.dtype, bytes("output_norm.weight")),
            None => (info.dtype, bytes(name)),
        };
        (NewTensor { name: name.to_owned(), dtype, shape: info.shape.clone() }, SharedBytes::from(bytes))
    });
    let tensors = tensors.collect();
    Checkpoint::in_memory("bigrams", keys, tensors).expect("valid tensors")
}

#[test]
fn drafts_of_a_good_predictor_are_accepted() {
    let backend = cpu(Isa::best(), 2).expect("the best instruction set is available");
    let model = load(&bigram_model(), &backend);
    let engine = || Engine::new(model.share(), backend.clone(), OPTIONS).expect("an engine");
    let request = |prompt: Vec<u32>, seed: u64| {
        let temperature = [0.0, 0.7, 1.5][seed as usize % 3];
        let sampling = SamplingParams { temperature, seed, logprobs: Some(2), ..SamplingParams::default() };
        Request { max_tokens: Some(40), ..Request::new(prompt, sampling) }
    };
    let requests: Vec<Request> = prompts(24, 90, 2).into_iter().zip(0..).map(|(p, i)| request(p, i)).collect();
    let counts = compare("bigrams", &engine, &requests, Some(4));
    assert!(counts.drafted > 500 && counts.accepted as f64 > 0.95 * counts.drafted as f64, "{counts:?}");
    // A request that switches drafts off has none.
    let without: Vec<Request> = requests.into_iter().map(|request| Request { speculate: false, ..request }).collect();
    assert_eq!(compare("bigrams without drafts", &engine, &without, Some(4)), DraftCounts::default());
}
