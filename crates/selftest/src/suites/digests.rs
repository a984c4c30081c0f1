//! Digests of logits against those of the sampler: the same lists, the same bits of every sum, and the same sampled
//! tokens.

use pellucid_sampling::{Digest, DigestQuery, Input, OwnedDigest, Sampler, SamplingParams, Workspace};
use pellucid_tensor::{Backend, DType, RowDigest, RowQuery, Shortlist};

use super::random_data::RandomData;

/// Kinds of rows: like a model's, nearly flat, with many ties, with banned tokens, and with a NaN.
const KINDS: [&str; 5] = ["usual", "flat", "ties", "banned", "not a number"];

fn row(kind: &str, cols: usize, random: &mut RandomData) -> Vec<f32> {
    let mut row = random.normals(cols);
    for (token, logit) in row.iter_mut().enumerate() {
        *logit *= if kind == "flat" { 0.01 } else { 3.0 };
        match kind {
            "ties" => *logit = (*logit * 4.0).round() / 4.0,
            "banned" if token % 7 != 3 => *logit = f32::NEG_INFINITY,
            "not a number" if token == cols / 2 => *logit = f32::NAN,
            _ => {}
        }
    }
    row
}

fn samplers(vocab_size: usize) -> Vec<Sampler> {
    let plain = SamplingParams { seed: 0x1234_5678_9abc_def0, ..SamplingParams::default() };
    let params = [
        SamplingParams { temperature: 0.0, ..plain.clone() },
        plain.clone(),
        SamplingParams { temperature: 0.6, logprobs: Some(5), ..plain.clone() },
        SamplingParams { temperature: 1.6, ..plain.clone() },
        SamplingParams { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..plain.clone() },
        SamplingParams { temperature: 0.1, top_p: 0.9, ..plain },
    ];
    params.iter().map(|params| Sampler::new(params, vocab_size).expect("valid parameters")).collect()
}

/// Checks digests of rows of many sizes. A size that the device does not digest is skipped.
pub fn digests_equal_the_samplers(backend: &dyn Backend) {
    let mut random = RandomData(77);
    for cols in [24, 1_000, 4_100, 20_000, 49_152, 128_256, 151_936, 262_144] {
        let Some(num_top) = backend.digest_len(cols) else { continue };
        let rows: Vec<Vec<f32>> = KINDS.iter().map(|kind| row(kind, cols, &mut random)).collect();
        let mut logits = backend.zeros(DType::F32, rows.len(), cols).expect("memory");
        backend.write(&rows.concat(), &mut logits).expect("an upload");
        for (index, sampler) in samplers(cols).iter().enumerate() {
            let position = 1000 * index as u32;
            let query = sampler.query(position).expect("a usual chain");
            // Adjacent rows have different draws.
            let next = |(seed, position): (u64, u32), row: usize| (seed, position + row as u32);
            let asked = |row: usize| RowQuery {
                temperature: query.temperature,
                race: query.race.map(|draw| next(draw, row)),
                shortlist: query.shortlist.map(|list| Shortlist {
                    draw: next(list.draw, row),
                    k: list.k,
                    p: list.p,
                    min_p: list.min_p,
                }),
            };
            let queries: Vec<RowQuery> = (0..rows.len()).map(asked).collect();
            let mut found = vec![RowDigest::default(); rows.len()];
            backend.digest(&logits, &queries).expect("digests");
            let ticket = backend.fetch_digests(rows.len()).expect("digests");
            backend.read_digests(ticket, &mut found).expect("digests");
            for ((kind, logits), (row, found)) in KINDS.iter().zip(&rows).zip(found.iter().enumerate()) {
                let what = format!("{cols} logits, {kind}, sampler {index}");
                assert_same_digest(&what, logits, &queries[row], num_top, found);
                assert_same_choice(&what, sampler, logits, position + row as u32, found, *kind == "usual");
            }
        }
    }
}

/// Asserts that a digest equals the sampler's digest of the same row.
pub(crate) fn assert_same_digest(what: &str, logits: &[f32], query: &RowQuery, num_top: usize, found: &RowDigest) {
    let expected = OwnedDigest::of(logits, &digest_query(query), num_top);
    assert!(expected.is_some() || !found.is_plain, "{what}: a row that needs the whole row was digested");
    let Some(expected) = expected.filter(|_| found.is_plain) else {
        assert!(may_need_whole_row(what), "{what}: an ordinary row was not digested");
        return;
    };
    assert!(found.top == expected.top, "{what}: another list of the most probable tokens");
    assert!(expected.has_all || !found.has_all, "{what}: a part of the tokens is reported as all");
    let bits = |totals: [f64; 2]| totals.map(f64::to_bits);
    assert_eq!(bits(found.totals), bits(expected.totals), "{what}: sums of weights");
    assert!(query.race.is_none() || !found.finalists.is_empty(), "{what}: no finalist of the draw");
}

/// Whether a row may need the whole row: many ties, or NaN.
fn may_need_whole_row(what: &str) -> bool {
    what.contains("ties") || what.contains("not a number")
}

/// Asserts that sampling from the digest and from the whole row give the same token.
fn assert_same_choice(
    what: &str,
    sampler: &Sampler,
    logits: &[f32],
    position: u32,
    found: &RowDigest,
    must_suffice: bool,
) {
    if !found.is_plain {
        return;
    }
    let (history, mut space) = (sampler.history(&[]), Workspace::new());
    let query = sampler.query(position).expect("a usual chain");
    let RowDigest { ref top, has_all, totals, ref finalists, .. } = *found;
    let digest = Digest { top, has_all, totals, temperature: query.temperature, finalists };
    let chosen = sampler.sample_digest(&digest, position, None, &mut space).expect("a token");
    assert!(chosen.is_some() || !must_suffice, "{what}: the digest does not suffice");
    let input = Input { logits, history: &history, position, mask: None };
    let expected = sampler.sample(&input, &mut sampler.state(), &mut space).expect("a token");
    assert!(chosen.is_none_or(|chosen| chosen == expected), "{what}: another token than from the whole row");
    // The device's assumption may be wrong only for a draw decided within the precision of f32.
    assert!(found.assumed == Some(expected.token) || !must_suffice, "{what}: {:?} was assumed", found.assumed);
}

/// Converts a query to the sampler's type.
pub fn digest_query(query: &RowQuery) -> DigestQuery {
    let RowQuery { temperature, race, shortlist } = *query;
    let shortlist = shortlist.map(|Shortlist { draw, k, p, min_p }| pellucid_sampling::Shortlist { draw, k, p, min_p });
    DigestQuery { temperature, race, shortlist }
}
