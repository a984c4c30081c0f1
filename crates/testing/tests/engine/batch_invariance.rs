//! Replies have the same bits alone and in a batch, with a cold cache and a warm one, preempted or not.

use pellucid_engine::{EngineOptions, Overcommit, Request};
use pellucid_testing::{InvarianceCase, invariance_cases};

use crate::support::{OPTIONS, bits, engine, prompts, request, serve};

#[test]
fn replies_have_the_same_bits_in_any_batch_cached_and_preempted() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for InvarianceCase { name, path, kv_dtype, .. } in invariance_cases(folder.path()) {
        let requests: Vec<Request> =
            prompts(24, 90).into_iter().enumerate().map(|(i, p)| request(p, i as u64 % 4)).collect();
        let options = EngineOptions { kv_dtype, ..OPTIONS };
        let mut alone = Vec::new();
        let mut single = engine(&path, 1, EngineOptions { max_sequences: 1, chunk_len: 64, ..options });
        for request in &requests {
            alone.push(bits(&serve(&mut single, std::slice::from_ref(request))[0]));
        }
        let settings = [
            options,
            EngineOptions { chunk_len: 1, ..options },
            EngineOptions { max_sequences: 3, step_tokens: 7, chunk_len: 5, ..options },
            // Little memory and overcommit: requests are preempted and computed again.
            EngineOptions { num_blocks: 24, overcommit: Overcommit::Always, ..options },
        ];
        for (i, options) in settings.into_iter().enumerate() {
            let mut engine = engine(&path, 2, options);
            for warmth in ["cold", "warm"] {
                let together = serve(&mut engine, &requests);
                for (j, outcome) in together.iter().enumerate() {
                    let case = format!("{name}, KV in {kv_dtype}: request {j}, setting {i}, {warmth}");
                    assert!(bits(outcome) == alone[j], "{case} differs");
                }
            }
            let stats = engine.stats();
            assert!(stats.cached_tokens > 0, "{name}: the second round uses the prefix cache");
            assert!(i != 3 || stats.preemptions > 0, "{name}: little memory causes preemptions");
        }
    }
}
