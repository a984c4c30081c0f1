//! Which texts the next batch takes: tenants take turns by the tokens that they got in this batch.

use std::collections::HashMap;

use super::EmbeddingInput;
use crate::TenantId;

/// A request, with the texts of it that are not computed yet.
pub(super) struct Waiting<'a> {
    pub(super) tenant: TenantId,
    pub(super) texts: &'a [EmbeddingInput],
}

/// Returns the requests whose next texts the batch takes, in order: at most `max_tokens` tokens, at least one text. A
/// request may occur several times. Among the requests of a tenant, the oldest goes first.
pub(super) fn select(waiting: &[Waiting<'_>], max_tokens: usize) -> Vec<usize> {
    let mut chosen = Vec::new();
    let mut num_tokens = 0;
    let mut by_tenant: HashMap<TenantId, usize> = HashMap::new();
    let mut num_taken = vec![0; waiting.len()];
    loop {
        let has_more = |index: &usize| num_taken[*index] < waiting[*index].texts.len();
        let tokens = |index: &usize| by_tenant.get(&waiting[*index].tenant).copied().unwrap_or(0);
        // The first of several with equal tokens, which is the oldest.
        let Some(next) = (0..waiting.len()).filter(has_more).min_by_key(tokens) else { break };
        let len = waiting[next].texts[num_taken[next]].ids.len();
        if !chosen.is_empty() && num_tokens + len > max_tokens {
            break;
        }
        num_tokens += len;
        *by_tenant.entry(waiting[next].tenant).or_default() += len;
        num_taken[next] += 1;
        chosen.push(next);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(lengths: &[usize]) -> Vec<EmbeddingInput> {
        lengths.iter().map(|&len| EmbeddingInput::new(vec![0; len])).collect()
    }

    #[test]
    fn tenants_take_turns_and_the_oldest_request_goes_first() {
        let (a, b) = (TenantId(1), TenantId(2));
        let lists = [texts(&[10; 5]), texts(&[10; 5]), texts(&[10, 10])];
        let waiting: Vec<Waiting<'_>> =
            [a, a, b].into_iter().zip(&lists).map(|(tenant, texts)| Waiting { tenant, texts }).collect();
        assert_eq!(select(&waiting, 60), [0, 2, 0, 2, 0, 0]);
        assert_eq!(select(&waiting, 1000).len(), 12, "everything fits");
        assert_eq!(select(&waiting, 5), [0], "a text that is too long for a batch is one of its own");
        assert!(select(&[], 5).is_empty());
    }
}
