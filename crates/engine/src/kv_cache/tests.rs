//! Reservations, sharing, isolation, quotas and eviction, and random operations with every invariant checked.

use super::*;

const BLOCK_LEN: usize = 4;

fn cache(num_blocks: usize) -> KvCache {
    KvCache::new(num_blocks, BLOCK_LEN, [7; 32])
}

fn tenant(id: u32) -> Scope {
    Scope::of(TenantId(id))
}

/// Runs a request that ends after its prompt. Returns the number of prompt tokens that were cached.
fn serve(cache: &mut KvCache, scope: Scope, prompt: &[u32]) -> usize {
    let (mut table, mut reservation, cached) = cache.admit(scope, prompt, 0).expect("enough blocks");
    cache.grow(&mut table, &mut reservation, prompt.len()).expect("reserved");
    assert_eq!(reservation.num_blocks(), 0, "exactly the needed blocks were reserved");
    cache.index_full_blocks(&mut table, prompt);
    cache.release(table);
    cache.cancel(reservation);
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
fn a_shared_prefix_is_found_by_all_tenants_and_nothing_beyond_it() {
    let mut cache = cache(32);
    cache.share_prefix(prompt(9, 0));
    assert_eq!(serve(&mut cache, tenant(1), &prompt(16, 0)), 0);
    assert_eq!(serve(&mut cache, tenant(2), &prompt(16, 0)), 8, "two whole blocks lie within the nine shared tokens");
    assert_eq!(serve(&mut cache, tenant(2), &prompt(16, 0)), 12);
}

#[test]
fn a_hash_collision_finds_no_wrong_block() {
    let mut cache = cache(16);
    cache.hasher.mask = 0;
    serve(&mut cache, tenant(1), &prompt(5, 0));
    assert_eq!(serve(&mut cache, tenant(1), &prompt(5, 100)), 0, "every hash is equal, the tokens are not");
    assert_eq!(serve(&mut cache, tenant(1), &prompt(5, 0)), 4);
    cache.hasher.is_trusted = true;
    assert_eq!(serve(&mut cache, tenant(1), &prompt(5, 100)), 4, "control: by its hash alone the wrong block is found");
}

#[test]
fn reservations_are_kept_and_what_does_not_fit_is_refused() {
    let mut cache = cache(4);
    let (mut first, mut first_reservation, _) = cache.admit(tenant(1), &prompt(2, 0), 3).expect("three of four");
    assert_eq!(cache.num_available(), 1);
    let refused = cache.admit(tenant(2), &prompt(2, 50), 2).expect_err("two are not left");
    assert_eq!(refused, OutOfBlocks::Memory { needed: 2, available: 1 });
    let (mut second, mut second_reservation, _) = cache.admit(tenant(2), &prompt(2, 50), 1).expect("the last one");
    cache.grow(&mut second, &mut second_reservation, 4).expect("reserved");
    assert!(cache.grow(&mut second, &mut second_reservation, 5).is_err(), "beyond its reservation there is nothing");
    cache.grow(&mut first, &mut first_reservation, 12).expect("reserved");
    for (table, reservation) in [(first, first_reservation), (second, second_reservation)] {
        cache.release(table);
        cache.cancel(reservation);
    }
    assert_eq!((cache.num_available(), cache.num_in_use()), (4, 0));
}

#[test]
fn idle_blocks_are_evicted_least_recently_used_first() {
    let mut cache = cache(4);
    serve(&mut cache, tenant(1), &prompt(8, 0));
    serve(&mut cache, tenant(1), &prompt(8, 100));
    serve(&mut cache, tenant(1), &prompt(8, 0));
    assert_eq!(cache.num_idle(), 4);
    serve(&mut cache, tenant(1), &prompt(4, 200));
    // One block of the older prompt was evicted, the end of its chain.
    assert_eq!(serve(&mut cache, tenant(1), &prompt(8, 0)), 4);
    assert_eq!(serve(&mut cache, tenant(1), &[&prompt(8, 0)[..], &[9]].concat()), 8);
}

#[test]
fn a_flood_evicts_its_own_blocks() {
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
    let refused = cache.admit(tenant(1), &prompt(2, 0), 5).expect_err("five blocks are above the quota");
    assert_eq!(refused, OutOfBlocks::Quota { needed: 5, quota: 4, available: 4 });
}

/// While requests run, a tenant at its quota evicts its own idle blocks and no other tenant's.
#[test]
fn a_quota_bounds_blocks_in_use_reserved_and_idle_together() {
    let mut cache = cache(8);
    cache.set_quota(TenantId(1), 4);
    serve(&mut cache, tenant(2), &prompt(16, 5000));
    serve(&mut cache, tenant(1), &prompt(16, 0));
    assert_eq!((cache.num_idle(), cache.usage(TenantId(1)).idle), (8, 4), "all blocks are idle");
    let held = |cache: &KvCache| {
        let TenantUsage { in_use, idle, reserved } = cache.usage(TenantId(1));
        (in_use, idle, reserved)
    };
    // Two blocks of the prompt are found. The two other idle ones are evicted for the two that are reserved.
    let (mut table, mut reservation, cached) = cache.admit(tenant(1), &prompt(9, 0), 4).expect("enough blocks");
    assert_eq!((cached, held(&cache)), (8, (2, 0, 2)));
    cache.grow(&mut table, &mut reservation, 16).expect("reserved");
    assert_eq!(held(&cache), (4, 0, 0));
    cache.release(table);
    cache.cancel(reservation);
    // Growth beyond a reservation evicts idle blocks too.
    let (mut table, mut reservation, _) = cache.admit(tenant(1), &prompt(4, 700), 0).expect("enough blocks");
    cache.grow(&mut table, &mut reservation, 16).expect("available");
    let (in_use, idle, _) = held(&cache);
    assert!(in_use == 4 && idle == 0, "{in_use} in use and {idle} idle");
    cache.release(table);
    cache.cancel(reservation);
    let reservation = cache.reserve(TenantId(1), 4).expect("enough blocks");
    assert_eq!(held(&cache), (0, 0, 4));
    cache.cancel(reservation);
    assert_eq!(serve(&mut cache, tenant(2), &prompt(17, 5000)), 16, "the other tenant's blocks are still there");
}

#[test]
fn forks_share_until_one_writes() {
    let mut cache = cache(16);
    let tokens = prompt(6, 0);
    // One full block for both, and two more for each.
    let (mut first, mut reservation, _) = cache.admit(tenant(1), &tokens, 5).expect("enough blocks");
    cache.grow(&mut first, &mut reservation, 6).expect("reserved");
    cache.index_full_blocks(&mut first, &tokens);
    let mut second = cache.fork(&first).unwrap();
    assert_eq!(first.blocks(), second.blocks());
    assert_eq!(cache.num_in_use(), 2);

    let copy = cache.make_writable(&mut second, &mut reservation, 6).expect("reserved").expect("the block is shared");
    assert_eq!(copy.from, first.blocks()[1]);
    assert_ne!(first.blocks()[1], second.blocks()[1]);
    assert_eq!(first.blocks()[0], second.blocks()[0], "the full block stays shared");
    assert_eq!(cache.make_writable(&mut first, &mut reservation, 6).expect("reserved"), None, "no longer shared");

    cache.grow(&mut first, &mut reservation, 12).expect("reserved");
    cache.grow(&mut second, &mut reservation, 12).expect("reserved");
    assert_eq!(reservation.num_blocks(), 0);
    cache.release_into(second, &mut reservation);
    assert_eq!(reservation.num_blocks(), 2, "the blocks that only the second held are reserved again");
    cache.release(first);
    cache.cancel(reservation);
    assert_eq!((cache.num_in_use(), cache.num_available()), (0, 16));
}

struct Live {
    table: BlockTable,
    reservation: Reservation,
    tokens: Vec<u32>,
}

/// Random admissions, growth, forks, writes and releases, with an audit after each.
#[test]
fn no_block_is_lost_or_owned_twice() {
    random_operations(cache(24));
    for (len, num_blocks, num_kept) in [(1, 24, 2), (6, 16, 8), (9, 12, 4)] {
        let mut cache = cache(24);
        cache.use_windows(WindowOptions { len, num_blocks, num_kept });
        random_operations(cache);
    }
}

fn random_operations(mut cache: KvCache) {
    let mut state = 12345u64;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % below as u64) as usize
    };
    cache.set_quota(TenantId(2), 9);
    let mut live: Vec<Live> = Vec::new();
    for _ in 0..20_000 {
        let any = if live.is_empty() { None } else { Some(random(live.len())) };
        match (random(5), any) {
            (0 | 1, _) => {
                let scope = tenant(random(3) as u32);
                let tokens = prompt(1 + random(14), 100 * random(4) as u32);
                if let Ok((table, reservation, cached)) = cache.admit(scope, &tokens, random(6)) {
                    assert!(cached < tokens.len());
                    live.push(Live { table, reservation, tokens });
                }
            }
            (2, Some(i)) => {
                let Live { table, reservation, tokens } = &mut live[i];
                if cache.grow(table, reservation, tokens.len()).is_ok() {
                    let _ = cache.make_writable(table, reservation, tokens.len() - 1);
                    cache.index_full_blocks(table, tokens);
                    cache.slide_window(table, tokens.len());
                    tokens.push(random(3) as u32);
                }
            }
            (3, Some(i)) => {
                let (tenant, tokens) = (live[i].table.scope().tenant, live[i].tokens.clone());
                if let Ok(reservation) = cache.reserve(tenant, random(3)) {
                    let table = cache.fork(&live[i].table).unwrap();
                    live.push(Live { table, reservation, tokens });
                }
            }
            (_, Some(i)) => {
                let Live { table, mut reservation, tokens } = live.swap_remove(i);
                match random(3) {
                    0 => cache.release_into(table, &mut reservation),
                    1 => cache.end(table, &tokens),
                    _ => drop(cache.release(table)),
                }
                cache.cancel(reservation);
            }
            _ => {}
        }
        check(&cache, &live);
    }
    for Live { table, reservation, .. } in live.drain(..) {
        cache.release(table);
        cache.cancel(reservation);
    }
    check(&cache, &[]);
    assert_eq!(cache.num_available(), 24);
}

fn check(cache: &KvCache, live: &[Live]) {
    cache
        .audit(live.iter().map(|live| &live.table), live.iter().map(|live| &live.reservation))
        .expect("consistent counters");
    assert_eq!(cache.free.len() + cache.num_idle() + cache.num_in_use(), cache.num_blocks());
}

/// Caches the whole blocks of a prompt.
fn store(cache: &mut KvCache, scope: Scope, tokens: &[u32]) {
    let (mut table, mut reservation, num_cached) = cache.admit(scope, tokens, 0).unwrap();
    assert!(num_cached < tokens.len());
    cache.grow(&mut table, &mut reservation, tokens.len()).unwrap();
    cache.index_full_blocks(&mut table, tokens);
    cache.release(table);
    cache.cancel(reservation);
}

#[test]
fn a_miss_names_a_missing_snapshot() {
    let mut cache = KvCache::new(8, 4, [1; 32]);
    cache.use_states(StateOptions { num_live: 2, num_others: 2, distance: 4 });
    let (own, other) = (Scope::of(TenantId(1)), Scope::of(TenantId(2)));
    let cached: Vec<u32> = (0..12).collect();
    store(&mut cache, own, &cached);
    let miss = |reason: MissReason| Some(PrefixMiss { reused: 0, reason });
    assert_eq!(cache.explain_miss(own, &cached, 0), miss(MissReason::NoSnapshot));
    assert_eq!(cache.explain_miss(other, &cached, 0), miss(MissReason::New));
}

#[test]
fn a_miss_names_the_first_token_that_differs_or_what_became_of_the_block() {
    let mut cache = KvCache::new(8, 4, [1; 32]);
    let (own, other) = (Scope::of(TenantId(1)), Scope::of(TenantId(2)));
    let cached: Vec<u32> = (0..12).collect();
    store(&mut cache, own, &cached);
    let reason = |cache: &KvCache, scope: Scope, tokens: &[u32]| {
        let reused = cache.find_prefix(scope, &tokens[..tokens.len() - 1]).len() * 4;
        cache.explain_miss(scope, tokens, reused)
    };
    assert_eq!(reason(&cache, own, &[0, 1, 2, 3, 4]), None, "every whole block was found");
    let changed = [0, 1, 2, 3, 4, 5, 99, 7, 8, 9];
    let miss = reason(&cache, own, &changed).unwrap();
    let difference =
        PrefixDifference { position: 6, before: vec![0, 1, 2, 3, 4, 5], prompt: vec![99, 7, 8, 9], cached: vec![6, 7] };
    assert_eq!(miss, PrefixMiss { reused: 4, reason: MissReason::Differs(difference) });
    // Another tenant learns nothing of these blocks, also with the same tokens.
    assert_eq!(reason(&cache, other, &changed).unwrap().reason, MissReason::New);
    let salted = Scope::salted(TenantId(1), "salt");
    assert_eq!(reason(&cache, salted, &cached).unwrap().reason, MissReason::OtherSalt);
    let longer: Vec<u32> = (0..20).collect();
    assert_eq!(reason(&cache, own, &longer).unwrap(), PrefixMiss { reused: 12, reason: MissReason::New });
    while cache.evict_from(TenantId(1)).is_some() {}
    assert_eq!(reason(&cache, own, &cached).unwrap(), PrefixMiss { reused: 0, reason: MissReason::Evicted });
    assert_eq!(reason(&cache, other, &cached).unwrap().reason, MissReason::New);
}

/// Applies events to a router's picture of the cache; every parent must be known.
fn follow(known: &mut Vec<u64>, events: Vec<KvEvent>) -> Vec<u32> {
    let mut stored = Vec::new();
    for event in events {
        match event {
            KvEvent::Stored { hash, parent, tokens } => {
                assert!(parent.is_none_or(|parent| known.contains(&parent)) && !known.contains(&hash));
                known.push(hash);
                stored.extend(tokens);
            }
            KvEvent::Removed { hash } => {
                let i = known.iter().position(|&other| other == hash).expect("a block that was stored");
                known.remove(i);
            }
        }
    }
    stored
}

#[test]
fn events_tell_which_blocks_of_the_tenant_can_be_found() {
    let mut cache = cache(8);
    cache.record_events(TenantId(1));
    let mut known = Vec::new();
    serve(&mut cache, tenant(1), &prompt(13, 0));
    assert_eq!(follow(&mut known, cache.take_events()), prompt(12, 0));
    // The second time nothing new is stored; a longer prompt adds its own blocks behind the known ones.
    serve(&mut cache, tenant(1), &prompt(13, 0));
    assert_eq!(cache.take_events(), []);
    serve(&mut cache, tenant(1), &prompt(17, 0));
    assert_eq!(follow(&mut known, cache.take_events()), prompt(16, 0)[12..]);
    // Another prompt takes the memory: at every time the events name exactly the blocks in the index.
    serve(&mut cache, tenant(1), &prompt(25, 500));
    follow(&mut known, cache.take_events());
    let mut found: Vec<u64> = cache.contents_of(tenant(1)).map(|(_, hash, _)| hash.short()).collect();
    found.sort_unstable();
    known.sort_unstable();
    assert_eq!(known, found);
    assert!(known.len() < 10, "some were evicted");
}

#[test]
fn events_never_concern_other_tenants_or_salts() {
    let mut cache = cache(32);
    cache.record_events(TenantId(1));
    serve(&mut cache, tenant(2), &prompt(13, 0));
    serve(&mut cache, Scope::salted(TenantId(1), "a"), &prompt(13, 0));
    // Blocks of theirs that are evicted are not named either.
    while cache.evict_one().is_some() {}
    assert_eq!(cache.take_events(), []);
    serve(&mut cache, tenant(1), &prompt(13, 0));
    assert_eq!(cache.take_events().len(), 3);
}

#[test]
fn events_include_shared_prefixes_so_that_chains_are_whole() {
    let mut cache = cache(32);
    cache.share_prefix(prompt(9, 0));
    cache.record_events(TenantId(1));
    let mut known = Vec::new();
    serve(&mut cache, tenant(2), &prompt(16, 0));
    assert_eq!(follow(&mut known, cache.take_events()), prompt(8, 0), "not what follows the shared prefix");
    serve(&mut cache, tenant(1), &prompt(16, 0));
    assert_eq!(follow(&mut known, cache.take_events()), prompt(16, 0)[8..]);
}
