//! Layers with sliding windows give back the blocks that fell out of the window; prefixes are found again, and probes
//! see what they would see without that.

use pellucid_engine::{AttentionProbe, EngineOptions, ProbeRequest, Request, Scope, TenantId};
use pellucid_selftest::goldens_folder;

use crate::support::{OPTIONS, bits, engine, request, serve};

/// So few blocks that layers with windows have as many as the others.
const WITHOUT: EngineOptions = EngineOptions { num_blocks: 24, ..OPTIONS };
const FAMILIES: [&str; 4] = ["gemma2", "gemma4-small", "gpt-oss", "olmo3"];

fn prompt() -> Vec<u32> {
    (0..23).map(|i| i * 7 % 90).collect()
}

#[test]
fn a_prefix_is_reused_where_its_window_was_kept() {
    for name in FAMILIES {
        let path = goldens_folder().join(name);
        let mut windowed = engine(&path, 1, OPTIONS);
        let mut fresh = |request: &Request| {
            let mut engine = engine(&path, 1, WITHOUT);
            assert!(windowed.cache().has_windows() && !engine.cache().has_windows());
            let cached = serve(&mut windowed, std::slice::from_ref(request));
            let expected = serve(&mut engine, std::slice::from_ref(request));
            assert!(bits(&cached[0]) == bits(&expected[0]), "{name}");
            (cached[0].tokens[0].clone(), cached[0].stats.expect("statistics").cached_tokens)
        };
        let prompt = prompt();
        let other_end: Vec<u32> = prompt[..18].iter().copied().chain([1, 2, 3, 4, 5, 6]).collect();
        let (reply, found) = fresh(&request(prompt.clone(), 5));
        assert_eq!(found, 0);
        let turn: Vec<u32> = prompt.iter().chain(&reply).copied().chain([1, 2, 3]).collect();
        // Blocks of 4 tokens, windows of 8. The last token of the reply was not computed. The first prompt that leaves
        // another has its window kept where it left, for the next ones.
        for (prompt, tenant, expected) in
            [(&prompt, 0, 20), (&turn, 0, 32), (&other_end, 0, 0), (&other_end, 0, 20), (&prompt, 1, 0)]
        {
            let (_, found) = fresh(&Request { scope: Scope::of(TenantId(tenant)), ..request(prompt.clone(), 5) });
            assert_eq!(found, expected, "{name}: {} tokens of tenant {tenant}", prompt.len());
        }
        let another_end: Vec<u32> = other_end[..17].iter().copied().chain([7, 8, 9, 10]).collect();
        assert_eq!(fresh(&request(another_end, 5)).1, 16, "{name}");
    }
}

/// The rows of a probe begin before the last window. They are computed and kept for it, also for a cached prompt.
#[test]
fn a_probe_finds_the_windows_of_all_its_rows() {
    for name in FAMILIES {
        let path = goldens_folder().join(name);
        let (mut windowed, mut without) = (engine(&path, 1, OPTIONS), engine(&path, 1, WITHOUT));
        let reply = serve(&mut windowed, &[request(prompt(), 5)])[0].tokens[0].clone();
        let turn: Vec<u32> = prompt().into_iter().chain(reply).collect();
        for (layer, rows, token, cached) in [(0, 1, 3, 32), (0, 9, 0, 20), (1, 20, 4, 0), (1, 30, 6, 0)] {
            let attention = Some(AttentionProbe { layer, head: None, rows });
            let probe = Some(ProbeRequest { token, layers: Some(3), attention });
            let request = Request { probe, ..request(turn.clone(), 5) };
            let found = &serve(&mut windowed, std::slice::from_ref(&request))[0];
            let expected = &serve(&mut without, &[request])[0];
            assert!(bits(found) == bits(expected), "{name}");
            assert!(found.probe.is_some() && found.probe == expected.probe, "{name}: {rows} rows at token {token}");
            assert_eq!(found.stats.expect("statistics").cached_tokens, cached, "{name}: {rows} rows at token {token}");
        }
    }
}
