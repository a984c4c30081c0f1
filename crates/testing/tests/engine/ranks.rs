//! Several ranks behind the engine: replies have the bits of one rank, with a cold and a warm cache, preemption and
//! forks.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_engine::{Engine, EngineOptions, Overcommit, Request};
use pellucid_model::{Decoder, GroupMember, LoadOptions, RankIdentity};
use pellucid_selftest::goldens_folder;
use pellucid_tensor::{Backend, DType};
use pellucid_testing::cpu;

use crate::support::{OPTIONS, bits, engine, prompts, request, serve};

fn engine_on_ranks(path: &Path, num_ranks: usize, options: EngineOptions) -> Engine {
    let checkpoint = Checkpoint::open(path).expect("a model");
    let backend = |_| cpu(Isa::best(), 1).expect("the best instruction set is available") as Arc<dyn Backend>;
    let members = GroupMember::of(&checkpoint, (0..num_ranks).map(backend), Duration::from_secs(20));
    let backend = members[0].backend.clone();
    let identity = RankIdentity::of_build("test");
    let model = Decoder::load_group(members, LoadOptions::default(), &identity, &mut |_, _| ()).expect("equal ranks");
    Engine::new(Box::new(model), backend, options).expect("an engine")
}

#[test]
fn replies_have_the_bits_of_one_rank_cached_preempted_and_forked() {
    let models = [("llama3", 2), ("qwen3-moe", 3), ("gpt-oss", 4), ("deepseek3", 3)];
    // Recurrent states are saved at edges of blocks, found by the prefix cache, and copied to forks.
    let recurrent = [("qwen3-next", 3), ("lfm2", 2), ("granite-hybrid", 4)];
    for (name, num_ranks) in models.into_iter().chain(recurrent) {
        let path = goldens_folder().join(name);
        // Some requests have several choices: their sequences fork, and blocks are copied when one of them writes.
        let requests: Vec<Request> = (prompts(16, 90).into_iter().enumerate())
            .map(|(i, prompt)| {
                let width = if i % 4 == 0 { 3 } else { 1 };
                Request { num_choices: width, best_of: width, ..request(prompt, i as u64 % 4) }
            })
            .collect();
        let mut single = engine(&path, 1, EngineOptions { chunk_len: 64, ..OPTIONS });
        let alone: Vec<_> =
            requests.iter().map(|request| bits(&serve(&mut single, std::slice::from_ref(request))[0])).collect();
        let settings = [
            EngineOptions { kv_dtype: DType::F32, ..OPTIONS },
            // Little memory and overcommit: requests are preempted and computed again.
            EngineOptions { num_blocks: 24, overcommit: Overcommit::Always, max_sequences: 8, ..OPTIONS },
        ];
        for (i, options) in settings.into_iter().enumerate() {
            let mut engine = engine_on_ranks(&path, num_ranks, options);
            for warmth in ["cold", "warm"] {
                for (j, outcome) in serve(&mut engine, &requests).iter().enumerate() {
                    let case = format!("{name} on {num_ranks} ranks: request {j}, setting {i}, {warmth}");
                    assert!(bits(outcome) == alone[j], "{case} differs");
                }
            }
            let stats = engine.stats();
            // With little memory, few snapshots of recurrent states stay in the cache.
            let is_recurrent = recurrent.contains(&(name, num_ranks));
            assert!(i == 1 && is_recurrent || stats.cached_tokens > 0, "{name}: a round uses the prefix cache");
            assert!(i != 1 || stats.preemptions > 0, "{name}: little memory causes preemptions");
        }
    }
}
