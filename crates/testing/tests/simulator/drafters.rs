//! Drafters for the simulator: none, right ones, wrong ones and hostile ones.

use pellucid_engine::{DraftContext, Drafter, Engine, SpeculationOptions};
use pellucid_selftest::suites::RandomData;
use pellucid_selftest::suites::speculation::drafters::{EdgeDrafter, RandomDrafter};
use pellucid_testing::FakeModel;

use crate::{CONTEXT, Random, VOCAB};

/// Proposes the most probable tokens of the model's pure function, which greedy requests without penalties get; one in
/// `error_every` is wrong.
struct Oracle {
    random: RandomData,
    error_every: usize,
}

impl Drafter for Oracle {
    fn propose(&mut self, context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>) {
        let mut tokens = context.tokens.to_vec();
        for _ in 0..max_len {
            let logits = FakeModel::logits_after(tokens.iter().copied(), VOCAB);
            let best = (0..VOCAB).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("a vocabulary");
            let is_wrong = self.random.below(self.error_every) == 0;
            let token = if is_wrong { self.random.below(VOCAB) } else { best } as u32;
            tokens.push(token);
            draft.push(token);
        }
    }
}

/// Gives an engine up to three drafters and a draft model, or none.
pub(crate) fn draw(engine: &mut Engine, random: &mut Random) {
    if random.chance(3) {
        return;
    }
    let max_draft_len = 1 + random.below(15);
    engine.set_speculation(SpeculationOptions {
        ngram: random.chance(2),
        suffix: random.chance(2),
        mtp: false,
        max_draft_len,
        fixed_draft_len: (!random.chance(3)).then_some(max_draft_len),
    });
    if !random.chance(3) {
        let random_data = RandomData(random.below(1000) as u64);
        engine.add_drafter(Box::new(Oracle { random: random_data, error_every: 2 + random.below(20) }));
    }
    if random.chance(4) {
        let mut model = FakeModel::new(VOCAB, CONTEXT);
        // A sequence with this token gets NaN instead of a draft.
        model.poison = random.chance(3).then(|| random.below(VOCAB) as u32);
        model.fails_at = random.chance(4).then(|| random.below(300));
        engine.set_draft_model(Box::new(model), 1 + random.below(60)).expect("memory for a small model");
    }
    if random.chance(6) {
        engine.add_drafter(Box::new(RandomDrafter::new(random.below(1000) as u64, VOCAB)));
    }
    if random.chance(6) {
        engine.add_drafter(Box::new(EdgeDrafter { vocab_size: VOCAB, num_calls: 0 }));
    }
}
