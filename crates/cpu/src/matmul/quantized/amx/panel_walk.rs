//! [`PanelWalk`]: the order in which one block of rows is multiplied with the units of several panels.

/// Panels that one block of rows is multiplied with in turns.
pub(super) const GROUP_PANELS: usize = 4;

/// The order in which units of adjacent panels are multiplied: panels are taken in groups, and of a group some units of
/// each panel in turn.
#[derive(Clone, Copy)]
pub(super) struct PanelWalk {
    pub(super) units: *const u8,
    pub(super) num_units: usize,
    pub(super) count: usize,
    pub(super) unit_bytes: usize,
    /// Units of a panel before the next panel's turn.
    pub(super) visit: usize,
}

/// A unit in that order.
#[derive(Clone, Copy)]
pub(super) struct UnitCursor {
    pub(super) unit: *const u8,
    /// Its index in the panel.
    pub(super) index: usize,
    pub(super) panel: usize,
    /// First unit of the panel's turn, and the end of it.
    pub(super) visit: (usize, usize),
    /// First panel of the group, and the end of it.
    pub(super) group: (usize, usize),
}

impl PanelWalk {
    /// The first unit of the group that begins with panel `start`.
    #[inline]
    pub(super) fn group(&self, start: usize) -> UnitCursor {
        let unit = self.units.wrapping_add(start * self.num_units * self.unit_bytes);
        let group = (start, self.count.min(start + GROUP_PANELS));
        UnitCursor { unit, index: 0, panel: start, visit: (0, self.num_units.min(self.visit)), group }
    }

    /// The unit after this one; after the last comes the first.
    #[inline(always)]
    pub(super) fn next(&self, cursor: UnitCursor) -> UnitCursor {
        if cursor.index + 1 < cursor.visit.1 {
            return UnitCursor { unit: cursor.unit.wrapping_add(self.unit_bytes), index: cursor.index + 1, ..cursor };
        }
        self.next_visit(cursor)
    }

    /// The first unit of the next panel's turn.
    #[inline(always)]
    pub(super) fn next_visit(&self, cursor: UnitCursor) -> UnitCursor {
        let UnitCursor { unit, index, panel, visit, group } = cursor;
        let panel_bytes = self.num_units * self.unit_bytes;
        if panel + 1 < group.1 {
            let unit = unit.wrapping_add(panel_bytes).wrapping_sub((index - visit.0) * self.unit_bytes);
            return UnitCursor { unit, index: visit.0, panel: panel + 1, visit, group };
        }
        if visit.1 == self.num_units {
            return self.group(if group.1 < self.count { group.1 } else { 0 });
        }
        let back = (panel - group.0) * panel_bytes;
        let unit = unit.wrapping_add((visit.1 - index) * self.unit_bytes).wrapping_sub(back);
        let visit = (visit.1, self.num_units.min(visit.1 + self.visit));
        UnitCursor { unit, index: visit.0, panel: group.0, visit, group }
    }
}
