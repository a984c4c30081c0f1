//! Classes of characters as the reference library has them, which come from tables of Unicode 8 and 9.
//!
//! They are made from the tables of `regex-syntax`, restricted to characters of that age; the few characters whose
//! class has changed since are named. A test compares every character with the reference.

use std::sync::OnceLock;

use regex_syntax::hir::{Class, HirKind};

/// A set of characters, as sorted ranges.
#[derive(Debug)]
pub(crate) struct CharRanges(Vec<(char, char)>);

impl CharRanges {
    fn new(class: &str) -> CharRanges {
        let hir = regex_syntax::parse(class).expect("a constant class");
        let HirKind::Class(Class::Unicode(class)) = hir.kind() else { unreachable!("{class} is a class") };
        CharRanges(class.ranges().iter().map(|range| (range.start(), range.end())).collect())
    }

    pub(crate) fn contains(&self, c: char) -> bool {
        let after = self.0.partition_point(|(first, _)| *first <= c);
        after > 0 && c <= self.0[after - 1].1
    }
}

/// Returns the set of punctuation, ASCII symbols included, as `Punctuation` and BERT's pre-tokenizer have it.
pub(crate) fn punctuation() -> &'static CharRanges {
    static SET: OnceLock<CharRanges> = OnceLock::new();
    SET.get_or_init(|| CharRanges::new(r"[[:punct:][\p{P}&&\p{age:8.0}]\x{166D}\x{111C9}]"))
}

/// Returns the set of marks that BERT's normalizer removes.
pub(crate) fn nonspacing_marks() -> &'static CharRanges {
    static SET: OnceLock<CharRanges> = OnceLock::new();
    SET.get_or_init(|| {
        CharRanges::new(r"[[[\p{Mn}&&\p{age:8.0}]\x{1734}\x{1171E}]--[\x{1885}\x{1886}\x{A9BD}\x{111C9}]]")
    })
}

/// Returns the set of control, format and private characters that BERT's normalizer removes.
pub(crate) fn controls() -> &'static CharRanges {
    static SET: OnceLock<CharRanges> = OnceLock::new();
    SET.get_or_init(|| CharRanges::new(r"[[\p{Cc}\p{Cf}\p{Co}]&&\p{age:8.0}]"))
}

/// The scripts of Unicode 9.
const SCRIPTS: &str = "\
     Adlam Ahom AnatolianHieroglyphs Arabic Armenian Avestan Balinese Bamum BassaVah Batak Bengali Bhaiksuki Bopomofo \
     Brahmi Braille Buginese Buhid CanadianAboriginal Carian CaucasianAlbanian Chakma Cham Cherokee Common Coptic \
     Cuneiform Cypriot Cyrillic Deseret Devanagari Duployan EgyptianHieroglyphs Elbasan Ethiopic Georgian Glagolitic \
     Gothic Grantha Greek Gujarati Gurmukhi Han Hangul Hanunoo Hatran Hebrew Hiragana ImperialAramaic Inherited \
     InscriptionalPahlavi InscriptionalParthian Javanese Kaithi Kannada Katakana KayahLi Kharoshthi Khmer Khojki \
     Khudawadi Lao Latin Lepcha Limbu LinearA LinearB Lisu Lycian Lydian Mahajani Malayalam Mandaic Manichaean \
     Marchen MeeteiMayek MendeKikakui MeroiticCursive MeroiticHieroglyphs Miao Modi Mongolian Mro Multani Myanmar \
     Nabataean NewTaiLue Newa Nko Ogham OlChiki OldHungarian OldItalic OldNorthArabian OldPermic OldPersian \
     OldSouthArabian OldTurkic Oriya Osage Osmanya PahawhHmong Palmyrene PauCinHau PhagsPa Phoenician PsalterPahlavi \
     Rejang Runic Samaritan Saurashtra Sharada Shavian Siddham SignWriting Sinhala SoraSompeng Sundanese SylotiNagri \
     Syriac Tagalog Tagbanwa TaiLe TaiTham TaiViet Takri Tamil Tangut Telugu Thaana Thai Tibetan Tifinagh Tirhuta \
     Ugaritic Vai WarangCiti Yi";

/// Characters whose script has changed since Unicode 9, with the script that they had.
const CHANGED_SCRIPTS: [(char, char, &str); 3] =
    [('\u{589}', '\u{589}', "Common"), ('\u{61C}', '\u{61C}', "Common"), ('\u{953}', '\u{954}', "Devanagari")];

/// Returns the number of a character's script, as `UnicodeScripts` has it: Hiragana and Katakana count as Han. `None`
/// for a space and for a character that Unicode 9 does not have; these belong to the script around them.
pub(crate) fn script(c: char) -> Option<u16> {
    static TABLE: OnceLock<Vec<(char, char, u16)>> = OnceLock::new();
    if c == ' ' {
        return None;
    }
    let table = TABLE.get_or_init(script_table);
    let after = table.partition_point(|(first, _, _)| *first <= c);
    table[..after].last().filter(|(_, last, _)| c <= *last).map(|(_, _, script)| *script)
}

fn script_table() -> Vec<(char, char, u16)> {
    let number = |name: &str| SCRIPTS.split_whitespace().position(|script| script == name).unwrap_or(usize::MAX) as u16;
    let mut table = Vec::new();
    for name in SCRIPTS.split_whitespace() {
        let script = number(if matches!(name, "Hiragana" | "Katakana") { "Han" } else { name });
        let class = format!(r"[[\p{{sc={name}}}&&\p{{age:9.0}}]--[\x{{589}}\x{{61C}}\x{{953}}\x{{954}}\x{{30FC}}]]");
        table.extend(CharRanges::new(&class).0.into_iter().map(|(first, last)| (first, last, script)));
    }
    table.extend(CHANGED_SCRIPTS.map(|(first, last, name)| (first, last, number(name))));
    // The mark that prolongs a vowel is common to Hiragana and Katakana.
    table.push(('\u{30FC}', '\u{30FC}', number("Han")));
    table.sort_unstable();
    table
}
