//! The blocks' bookkeeping: reservations, sharing, isolation, eviction, and a random walk with every invariant checked.

use super::*;

const BLOCK_LEN: usize = 4;

fn cache(num_blocks: usize) -> KvCache {
    KvCache::new(num_blocks, BLOCK_LEN, [7; 32])
}

fn tenant(id: u32) -> Scope {
    Scope::of(TenantId(id))
}

/// Computes a whole prompt and gives it back, as a request that ends at once.
fn serve(cache: &mut KvCache, scope: Scope, prompt: &[u32]) -> usize {
    let (mut table, cached) = cache.admit(scope, prompt, prompt.len()).expect("room");
    cache.grow(&mut table, prompt.len()).expect("reserved");
    cache.remember(&mut table, prompt);
    cache.release(table);
    cached
}

fn prompt(len: usize, first: u32) -> Vec<u32> {
    (0..len as u32).map(|i| first + i).collect()
}

#[test]
fn a_tenant_finds_its_own_prefix_and_always_computes_the_last_token() {
    let mut cache = cache(16);
    assert_eq!(serve(&mut cache, tenant(1), &prompt(12, 0)), 0);
    assert_eq!(serve(&mut cache, tenant(1), &prompt(12, 0)), 8, "the block of the last token is computed anew");
    assert_eq!(serve(&mut cache, tenant(1), &prompt(14, 0)), 12);
    let mut other = prompt(12, 0);
    other[5] = 99;
    assert_eq!(serve(&mut cache, tenant(1), &other), 4, "only the blocks before the difference");
}

#[test]
fn nobody_finds_another_tenants_blocks_and_a_salt_narrows() {
    let mut cache = cache(32);
    let prompt = prompt(13, 0);
    serve(&mut cache, tenant(1), &prompt);
    assert_eq!(serve(&mut cache, tenant(2), &prompt), 0);
    assert_eq!(serve(&mut cache, Scope::salted(TenantId(1), "a"), &prompt), 0);
    assert_eq!(serve(&mut cache, Scope::salted(TenantId(1), "a"), &prompt), 12);
    assert_eq!(serve(&mut cache, Scope::salted(TenantId(1), "b"), &prompt), 0);
}

#[test]
fn a_declared_prefix_is_found_by_all_and_nothing_beyond_it() {
    let mut cache = cache(32);
    cache.share_prefix(prompt(9, 0));
    assert_eq!(serve(&mut cache, tenant(1), &prompt(16, 0)), 0);
    assert_eq!(serve(&mut cache, tenant(2), &prompt(16, 0)), 8, "two whole blocks lie within the declared nine tokens");
    assert_eq!(serve(&mut cache, tenant(2), &prompt(16, 0)), 12);
}

#[test]
fn a_collision_of_keys_gives_no_wrong_block() {
    let mut cache = cache(16);
    cache.keyer.mask = 0;
    serve(&mut cache, tenant(1), &prompt(5, 0));
    assert_eq!(serve(&mut cache, tenant(1), &prompt(5, 100)), 0, "every key is equal, the tokens are not");
    assert_eq!(serve(&mut cache, tenant(1), &prompt(5, 0)), 4);
}

#[test]
fn reservations_are_kept_and_what_does_not_fit_is_refused() {
    let mut cache = cache(4);
    let (mut first, _) = cache.admit(tenant(1), &prompt(2, 0), 12).expect("three of four");
    assert_eq!(cache.num_available(), 1);
    let refused = cache.admit(tenant(2), &prompt(2, 50), 8).expect_err("two are not left");
    assert_eq!(refused, NoRoom::Memory { needed: 2, available: 1 });
    let (mut second, _) = cache.admit(tenant(2), &prompt(2, 50), 4).expect("the last one");
    cache.grow(&mut second, 4).expect("reserved");
    assert!(cache.grow(&mut second, 5).is_err(), "beyond its reservation there is nothing");
    cache.grow(&mut first, 12).expect("what was promised is there");
    cache.release(first);
    cache.release(second);
    assert_eq!((cache.num_available(), cache.num_in_use()), (4, 0));
}

#[test]
fn idle_blocks_make_room_least_recently_used_first() {
    let mut cache = cache(4);
    serve(&mut cache, tenant(1), &prompt(8, 0));
    serve(&mut cache, tenant(1), &prompt(8, 100));
    serve(&mut cache, tenant(1), &prompt(8, 0));
    assert_eq!(cache.num_idle(), 4);
    serve(&mut cache, tenant(1), &prompt(4, 200));
    // One block of the older prompt went, the end of its chain.
    assert_eq!(serve(&mut cache, tenant(1), &prompt(8, 0)), 4);
    assert_eq!(serve(&mut cache, tenant(1), &[&prompt(8, 0)[..], &[9]].concat()), 8);
}

#[test]
fn a_flood_pushes_out_its_own_blocks() {
    let mut cache = cache(20);
    serve(&mut cache, tenant(1), &prompt(9, 0));
    for i in 1..100 {
        serve(&mut cache, tenant(2), &prompt(12, 1000 * i));
    }
    assert_eq!(serve(&mut cache, tenant(1), &prompt(9, 0)), 8, "the quiet tenant's blocks are still there");
}

#[test]
fn a_quota_bounds_what_a_tenant_holds() {
    let mut cache = cache(20);
    cache.set_quota(TenantId(1), 4);
    for i in 0..10 {
        serve(&mut cache, tenant(1), &prompt(12, 1000 * i));
        assert!(cache.usage(TenantId(1)).idle <= 4);
    }
    let refused = cache.admit(tenant(1), &prompt(2, 0), 20).expect_err("five blocks are above the quota");
    assert_eq!(refused, NoRoom::Quota { needed: 5, quota: 4, available: 4 });
}

#[test]
fn forks_share_until_one_writes() {
    let mut cache = cache(16);
    let tokens = prompt(6, 0);
    let (mut first, _) = cache.admit(tenant(1), &tokens, 12).expect("room");
    cache.grow(&mut first, 6).expect("reserved");
    cache.remember(&mut first, &tokens);
    let mut second = cache.fork(&mut first, 12).expect("room");
    assert_eq!(first.blocks(), second.blocks());
    assert_eq!(cache.num_in_use(), 2);

    let copy = cache.make_writable(&mut second, 6).expect("reserved").expect("the block is shared");
    assert_eq!(copy.from, first.blocks()[1]);
    assert_ne!(first.blocks()[1], second.blocks()[1]);
    assert_eq!(first.blocks()[0], second.blocks()[0], "the full block stays shared");
    assert_eq!(cache.make_writable(&mut first, 6).expect("reserved"), None, "alone again");

    cache.grow(&mut first, 12).expect("reserved");
    cache.grow(&mut second, 12).expect("reserved");
    cache.release(first);
    cache.release(second);
    assert_eq!((cache.num_in_use(), cache.num_available()), (0, 16));
}

/// Random admissions, growth, forks, writes and releases, with everything counted again after each.
#[test]
fn no_block_is_lost_or_owned_twice() {
    let mut state = 12345u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut cache = cache(24);
    cache.set_quota(TenantId(2), 9);
    let mut live: Vec<(BlockTable, Vec<u32>)> = Vec::new();
    for _ in 0..20_000 {
        match random(5) {
            0 | 1 => {
                let scope = tenant(random(3) as u32);
                let len = 1 + random(14) as usize;
                let tokens = prompt(len, 100 * random(4) as u32);
                if let Ok((table, cached)) = cache.admit(scope, &tokens, len + random(8) as usize) {
                    assert!(cached < len);
                    live.push((table, tokens));
                }
            }
            2 if !live.is_empty() => {
                let i = random(live.len() as u64) as usize;
                let (table, tokens) = &mut live[i];
                if cache.grow(table, tokens.len()).is_ok() {
                    let last = tokens.len() - 1;
                    let _ = cache.make_writable(table, last);
                    cache.remember(table, tokens);
                    tokens.push(random(3) as u32);
                }
            }
            3 if !live.is_empty() => {
                let i = random(live.len() as u64) as usize;
                let (table, tokens) = &mut live[i];
                let tokens = tokens.clone();
                if let Ok(fork) = cache.fork(table, tokens.len() + 2) {
                    live.push((fork, tokens));
                }
            }
            _ if !live.is_empty() => {
                let (table, _) = live.swap_remove(random(live.len() as u64) as usize);
                cache.release(table);
            }
            _ => {}
        }
        check(&cache, &live);
    }
    live.drain(..).for_each(|(table, _)| cache.release(table));
    check(&cache, &[]);
    assert_eq!(cache.num_available(), 24);
}

fn check(cache: &KvCache, live: &[(BlockTable, Vec<u32>)]) {
    let mut users = vec![0u32; cache.num_blocks()];
    for (table, _) in live {
        table.blocks().iter().for_each(|&block| users[block as usize] += 1);
    }
    for (block, entry) in cache.blocks.iter().enumerate() {
        assert_eq!(entry.num_users, users[block], "block {block}: references");
        let is_free = cache.free.contains(&(block as BlockId));
        assert!(!is_free || (users[block] == 0 && entry.content.is_none()), "block {block} is free and not empty");
    }
    let reserved: usize = live.iter().map(|(table, _)| table.reserved).sum();
    assert_eq!(cache.reserved, reserved);
    assert_eq!(cache.free.len() + cache.num_idle() + cache.num_in_use(), cache.num_blocks());
    assert!(cache.free.len() + cache.num_idle() >= cache.reserved, "more is promised than there is");
    for tenant in 0..3 {
        let in_use: usize = live
            .iter()
            .filter(|(table, _)| table.scope().tenant == TenantId(tenant))
            .map(|(table, _)| table.blocks().len())
            .sum();
        assert_eq!(cache.usage(TenantId(tenant)).in_use, in_use);
    }
    // A block that two tenants hold would be a leak: nothing is declared shared here.
    for (a, _) in live {
        for (b, _) in live.iter().filter(|(b, _)| b.scope() != a.scope()) {
            assert!(a.blocks().iter().all(|block| !b.blocks().contains(block)), "two tenants hold one block");
        }
    }
}
