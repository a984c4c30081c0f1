//! Replies have the same bits alone and in a batch, with a cold cache and a warm one, preempted or not.

use pellucid_engine::{EngineOptions, Overcommit, Request, Scope, TenantId};
use pellucid_sampling::SamplingParams;
use pellucid_selftest::goldens_folder;
use pellucid_testing::{InvarianceCase, invariance_cases};

use crate::support::{OPTIONS, bits, engine, prompts, request, serve};

#[test]
fn replies_have_the_same_bits_in_any_batch_cached_and_preempted() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for InvarianceCase { name, path, kv_dtype, .. } in invariance_cases(folder.path()) {
        let requests: Vec<Request> =
            prompts(24, 90).into_iter().enumerate().map(|(i, p)| request(p, i as u64 % 4)).collect();
        let has_state = ["lfm2", "qwen3-next", "qwen35", "granite-hybrid", "nemotron-h"]
            .iter()
            .any(|family| name.starts_with(family));
        let has_state = has_state && name != "granite-hybrid-attention";
        // A snapshot of a recurrent state at every block: by default, a large state has fewer slots for snapshots than
        // there are prompts here, and the cache would keep none until its prompt is sent again.
        let options = EngineOptions { kv_dtype, snapshot_distance: has_state.then_some(1), ..OPTIONS };
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
        // Snapshots of recurrent states at some blocks only.
        let sparse = has_state.then_some(EngineOptions { snapshot_distance: Some(3), ..options });
        for (i, options) in settings.into_iter().chain(sparse).enumerate() {
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

/// Recurrent states: snapshots at a distance and at the end of a prompt, of one tenant alone.
#[test]
fn a_prefix_is_reused_up_to_its_last_snapshot() {
    ["lfm2", "qwen35", "granite-hybrid"].into_iter().for_each(prefixes_are_reused_up_to_a_snapshot);
}

fn prefixes_are_reused_up_to_a_snapshot(name: &str) {
    let path = goldens_folder().join(name);
    let mut engine = engine(&path, 1, EngineOptions { snapshot_distance: Some(3), ..OPTIONS });
    let prompt: Vec<u32> = (0..23).map(|i| i * 7 % 90).collect();
    let other_end: Vec<u32> = prompt[..18].iter().copied().chain([1, 2, 3, 4, 5, 6]).collect();
    let longer: Vec<u32> = prompt.iter().copied().chain([1, 2, 3]).collect();
    // Blocks of 4 tokens: snapshots are at 12 (the distance) and at 20 (the end of the prompt).
    for (prompt, tenant, cached) in
        [(&prompt, 0, 0), (&prompt, 0, 20), (&other_end, 0, 12), (&longer, 0, 20), (&prompt, 1, 0)]
    {
        let request = Request { scope: Scope::of(TenantId(tenant)), ..request(prompt.clone(), 5) };
        let found = serve(&mut engine, std::slice::from_ref(&request));
        assert_eq!(
            found[0].stats.expect("statistics").cached_tokens,
            cached,
            "{} tokens of tenant {tenant}",
            prompt.len()
        );
        let fresh = serve(&mut super::support::engine(&path, 1, OPTIONS), &[request]);
        assert!(bits(&found[0]) == bits(&fresh[0]), "{} tokens of tenant {tenant}", prompt.len());
    }
}

#[test]
fn greedy_choices_of_one_prompt_are_equal() {
    for name in ["lfm2", "qwen35", "nemotron-h", "llama3"] {
        let mut engine = engine(&goldens_folder().join(name), 1, OPTIONS);
        let prompt: Vec<u32> = (0..18).map(|i| i * 5 % 90).collect();
        let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let request = Request { max_tokens: Some(12), ..Request::new(prompt, greedy) };
        let one = serve(&mut engine, std::slice::from_ref(&request))[0].tokens[0].clone();
        let three = serve(&mut engine, &[Request { num_choices: 3, best_of: 3, ..request }]);
        assert_eq!(three[0].tokens, vec![one; 3], "{name}");
    }
}
