//! The choice of a token: greedy, or a draw at a temperature.
//!
//! The draw is a race. Every token i gets the time `-ln(u_i) / p_i`, with u_i keyed by seed, position and token, and the fastest wins.
//! That is exactly a draw from p, needs no sort and no running sum, and does not depend on the order of the candidates.

use crate::philox::uniform;

/// How to choose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// Logits are divided by it; 0 chooses the highest logit.
    pub temperature: f32,
    pub seed: u64,
}

/// Why no token could be chosen, or why the parameters were refused.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("temperature: expected 0 to {MAX_TEMPERATURE}, found {found}")]
    Temperature { found: f32 },
    #[error("the model gave a logit that is not a number for token {token}")]
    NotANumber { token: u32 },
    #[error("every token is ruled out: no logit is finite")]
    NothingLeft,
}

/// Far above any use: at 100, odds of a million to one become 1.15 to one.
pub const MAX_TEMPERATURE: f32 = 100.0;

/// Below every value of ln(-ln u): the largest u is 1 - 2^-25, whose value is -17.33.
const FASTEST_START: f64 = -17.4;

impl SamplingParams {
    pub fn check(&self) -> Result<(), Error> {
        if (0.0..=MAX_TEMPERATURE).contains(&self.temperature) {
            Ok(())
        } else {
            Err(Error::Temperature { found: self.temperature })
        }
    }
}

/// Chooses the token at `position` from its logits.
pub fn sample(logits: &[f32], position: u32, params: &SamplingParams) -> Result<u32, Error> {
    params.check()?;
    if let Some(token) = logits.iter().position(|logit| logit.is_nan()) {
        return Err(Error::NotANumber { token: token as u32 });
    }
    let best = argmax(logits).ok_or(Error::NothingLeft)?;
    let largest = logits[best as usize];
    // A temperature so low that dividing by it overflows is greedy in all but name.
    let inverse = 1.0 / params.temperature;
    if params.temperature == 0.0 || !inverse.is_finite() {
        return Ok(best);
    }
    // The logarithm of a race time, -ln(u) / p with p proportional to exp((logit - largest) / T): logarithms neither overflow nor
    // underflow, and the fastest in one is the fastest in the other.
    let start = |token: u32| libm::log(-libm::log(f64::from(uniform(params.seed, position, token))));
    let mut winner = (start(best), best);
    for (token, &logit) in logits.iter().enumerate() {
        let handicap = f64::from((largest - logit) * inverse);
        // Who cannot win with the luckiest number of all need not draw one.
        if FASTEST_START + handicap >= winner.0 || token as u32 == best {
            continue;
        }
        let time = start(token as u32) + handicap;
        if time < winner.0 {
            winner = (time, token as u32);
        }
    }
    Ok(winner.1)
}

/// The highest logit, ties to the lowest token; `None` when no logit is above minus infinity.
fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(f32, u32)> = None;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > best.map_or(f32::NEG_INFINITY, |best| best.0) {
            best = Some((logit, token as u32));
        }
    }
    best.map(|best| best.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(logits: &[f32], position: u32, temperature: f32) -> u32 {
        sample(logits, position, &SamplingParams { temperature, seed: 42 }).unwrap()
    }

    #[test]
    fn greedy_takes_the_highest_and_ties_go_to_the_lowest_token() {
        assert_eq!(draw(&[1.0, 3.0, 2.0, 3.0], 0, 0.0), 1);
        assert_eq!(draw(&[f32::NEG_INFINITY, -5.0], 9, 0.0), 1);
    }

    #[test]
    fn the_race_follows_the_softmax() {
        // The logits of numerics' known answer: at temperature 1 the first has about 0.83.
        let logits = [8.7f32, 6.2, 5.9, 5.1, 4.3, 4.1, 3.8];
        for temperature in [0.5, 1.0, 2.0] {
            let weights: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / f64::from(temperature)).exp()).collect();
            let total: f64 = weights.iter().sum();
            const DRAWS: u32 = 200_000;
            let mut counts = [0u32; 7];
            for position in 0..DRAWS {
                counts[draw(&logits, position, temperature) as usize] += 1;
            }
            let chi_square: f64 = (counts.iter().zip(&weights))
                .map(|(&count, weight)| {
                    let expected = weight / total * f64::from(DRAWS);
                    (f64::from(count) - expected).powi(2) / expected
                })
                .sum();
            // Six degrees of freedom: one correct generator in a thousand exceeds 22.5.
            assert!(chi_square < 22.5, "temperature {temperature}: chi-square {chi_square}, counts {counts:?}");
        }
    }

    #[test]
    fn the_same_seed_and_position_give_the_same_token() {
        let logits: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin() * 4.0).collect();
        let tokens: Vec<u32> = (0..50).map(|position| draw(&logits, position, 1.0)).collect();
        assert_eq!(tokens, (0..50).map(|position| draw(&logits, position, 1.0)).collect::<Vec<_>>());
        assert!(tokens.windows(2).any(|pair| pair[0] != pair[1]), "positions draw anew");
        let other = sample(&logits, 0, &SamplingParams { temperature: 1.0, seed: 43 }).unwrap();
        assert!((0..50).any(|position| draw(&logits, position, 1.0) != other));
    }

    #[test]
    fn extremes_are_neither_panics_nor_nonsense() {
        assert_eq!(draw(&[0.0, f32::MAX, -f32::MAX], 3, 1e-45), 1);
        assert_eq!(draw(&[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY], 1, 100.0), 1);
        let params = SamplingParams { temperature: 1.0, seed: 0 };
        assert_eq!(sample(&[0.0, f32::NAN], 0, &params), Err(Error::NotANumber { token: 1 }));
        assert_eq!(sample(&[f32::NEG_INFINITY; 3], 0, &params), Err(Error::NothingLeft));
        assert_eq!(sample(&[], 0, &params), Err(Error::NothingLeft));
        for temperature in [-1.0, f32::NAN, f32::INFINITY, 100.1] {
            assert!(sample(&[0.0], 0, &SamplingParams { temperature, seed: 0 }).is_err(), "{temperature} is refused");
        }
    }
}
