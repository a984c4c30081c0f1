//! Thousands of prompts on every tiny model and KV format.

use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::{CpuBackend, Isa};
use pellucid_engine::{Engine, EngineOptions, Request};
use pellucid_model::{Decoder, LoadOptions, Model};
use pellucid_selftest::goldens_folder;
use pellucid_selftest::suites::speculation::drafts_change_no_reply;
use pellucid_tensor::Backend;
use pellucid_testing::{FakeModel, InvarianceCase, cpu, invariance_cases};

use crate::support::{OPTIONS, SharedModel, compare, prompts, request};

/// Prompts of each model; each is answered once without and eight times with drafts.
const NUM_PROMPTS: usize = 48;

#[test]
fn drafts_change_no_reply_of_any_family() {
    let rounds = std::env::var("PELLUCID_ROUNDS").map_or(1, |rounds| rounds.parse().expect("a number"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (mut num_replies, mut accepted) = (0, 0);
    for (i, InvarianceCase { name, path, kv_dtype, .. }) in invariance_cases(folder.path()).into_iter().enumerate() {
        let backend = cpu(Isa::best(), 1 + i % 2).expect("the best instruction set is available");
        let checkpoint = Checkpoint::open(&path).expect("a model");
        let load = LoadOptions::default();
        let model = Decoder::load(&checkpoint, backend.clone(), load, &mut |_, _| ()).expect("it loads");
        let model = SharedModel::new(model);
        let options = EngineOptions { kv_dtype, ..OPTIONS };
        let engine = || Engine::new(model.share(), backend.clone(), options).expect("an engine");
        for round in 0..rounds {
            let prompts = prompts(NUM_PROMPTS, 90, round + i as u32);
            let requests: Vec<Request> = prompts.into_iter().zip(0..).map(|(p, seed)| request(p, seed)).collect();
            accepted += compare(&format!("{name}, KV in {kv_dtype}, round {round}"), &engine, &requests).accepted;
            num_replies += 9 * requests.len();
        }
    }
    eprintln!("{num_replies} replies, {accepted} drafted tokens accepted");
    assert!(num_replies >= 10_000 && accepted > 30_000, "{num_replies} replies, {accepted} drafted tokens accepted");
}

fn golden(name: &str, backend: &Arc<CpuBackend>) -> Decoder {
    let checkpoint = Checkpoint::open(&goldens_folder().join(name)).expect("a golden");
    Decoder::load(&checkpoint, backend.clone(), LoadOptions::default(), &mut |_, _| ()).expect("it loads")
}

/// The check of `pellucid selftest`, with a tiny model on the CPU, and with a fake one that looks ahead.
#[test]
fn the_speculation_suite_passes() {
    let cpu = cpu(Isa::best(), 2).expect("the best instruction set is available");
    let backend: Arc<dyn Backend> = cpu.clone();
    drafts_change_no_reply(&|| Box::new(golden("llama3", &cpu)), &backend);
    let load = || -> Box<dyn Model> {
        let mut model = FakeModel::new(96, 256);
        model.is_asynchronous = true;
        model.digest_len = Some(40);
        Box::new(model)
    };
    let backend: Arc<dyn Backend> = FakeModel::new(1, 1).backend();
    drafts_change_no_reply(&load, &backend);
}
