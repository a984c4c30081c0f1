//! Refuses grammars with a part that no finite text satisfies, such as a schema whose required property contains the
//! schema itself, or a string with two patterns that exclude each other. A reply that begins such a part could never
//! end.

use llguidance::api::ParserLimits;
use llguidance::earley::regexvec::{LexemeSet, RegexVec};
use llguidance::earley::{CGrammar, CSymIdx};

/// A rule that waits until all its symbols are known to have a finite text.
struct Rule {
    of: CSymIdx,
    num_open: usize,
}

/// Checks that every symbol that can occur in a reply has a finite text. Takes time linear in the size of the grammar.
pub(crate) fn check(grammar: &CGrammar, limits: &ParserLimits) -> Result<(), String> {
    let mut lexer = grammar.lexer_spec().to_regex_vec(&mut limits.clone()).map_err(|error| error.to_string())?;
    let reachable = reachable(grammar);
    let num_symbols = reachable.iter().map(|symbol| symbol.as_index() + 1).max().unwrap_or(0);
    let mut rules: Vec<Rule> = Vec::new();
    let mut uses: Vec<Vec<usize>> = vec![Vec::new(); num_symbols];
    let mut is_finite = vec![false; num_symbols];
    let mut found: Vec<CSymIdx> = Vec::new();
    for &symbol in &reachable {
        for &rule in grammar.rules_of(symbol) {
            let symbols = grammar.rule_rhs(rule).0;
            symbols.iter().for_each(|part| uses[part.as_index()].push(rules.len()));
            rules.push(Rule { of: symbol, num_open: symbols.len() });
        }
        if has_text(grammar, symbol, &mut lexer) {
            is_finite[symbol.as_index()] = true;
            found.push(symbol);
        }
    }
    while let Some(symbol) = found.pop() {
        for &rule in &uses[symbol.as_index()] {
            let Rule { of, num_open } = &mut rules[rule];
            *num_open -= 1;
            if *num_open == 0 && !is_finite[of.as_index()] {
                is_finite[of.as_index()] = true;
                found.push(*of);
            }
        }
    }
    match reachable.iter().all(|symbol| is_finite[symbol.as_index()]) {
        true => Ok(()),
        false => Err("it has a part that no finite text satisfies, so a reply could not end".into()),
    }
}

/// Returns the symbols that can occur in a text.
pub(crate) fn reachable(grammar: &CGrammar) -> Vec<CSymIdx> {
    let mut symbols = vec![grammar.start()];
    let mut is_known = vec![false; grammar.start().as_index() + 1];
    is_known[grammar.start().as_index()] = true;
    let mut next = 0;
    while let Some(&symbol) = symbols.get(next) {
        next += 1;
        for &part in grammar.rules_of(symbol).iter().flat_map(|&rule| grammar.rule_rhs(rule).0) {
            let index = part.as_index();
            is_known.resize(is_known.len().max(index + 1), false);
            if !std::mem::replace(&mut is_known[index], true) {
                symbols.push(part);
            }
        }
    }
    symbols
}

/// Whether a symbol has a text by itself: the empty one, or one that its expression matches.
fn has_text(grammar: &CGrammar, symbol: CSymIdx, lexer: &mut RegexVec) -> bool {
    let data = grammar.sym_data(symbol);
    if data.is_nullable || !data.cond_nullable.is_empty() {
        return true;
    }
    data.lexeme.is_some_and(|lexeme| {
        let mut only = LexemeSet::new(grammar.lexer_spec().lexemes.len());
        only.add(lexeme);
        let start = lexer.initial_state(&only);
        lexer.state_desc(start).possible.contains(lexeme)
    })
}
