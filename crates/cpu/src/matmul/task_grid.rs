//! [`TaskGrid`]: divides products into tasks of some panels of columns by some blocks of rows.

use crate::matmul::BLOCK_ROWS;
use std::ops::Range;

/// Maximum panels of a task with many rows. More panels mean that rows are read less often, up to what a second-level
/// cache holds.
const MAX_PANELS: usize = 16;

/// From this number of rows on, arithmetic takes longer than reading the weights.
const MANY_ROWS: usize = 32;

/// Tasks per thread: several, so that the others do not wait long for a thread that was interrupted.
const TASKS_PER_THREAD: usize = 4;

/// If a task would have fewer panels than this, because there are many threads, tasks divide the rows as well.
const MIN_PANELS: usize = 8;
/// Minimum blocks of rows of a task when rows are divided: each task unpacks its panels once for all its blocks.
const MIN_BLOCKS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskGrid {
    num_panels: usize,
    pub(super) panels_per_task: usize,
    num_blocks: usize,
    blocks_per_task: usize,
}

impl TaskGrid {
    pub(super) fn new(num_rows: usize, num_panels: usize, num_threads: usize) -> Self {
        let num_blocks = num_rows.div_ceil(BLOCK_ROWS);
        if num_rows < MANY_ROWS {
            let panels_per_task = panels_for_few_rows(num_panels, num_threads);
            return TaskGrid { num_panels, panels_per_task, num_blocks, blocks_per_task: num_blocks };
        }
        TaskGrid::many_rows(num_panels, num_blocks, num_threads, MAX_PANELS)
    }

    /// The grid of a gated pair: a task computes the same panels of both weights.
    #[cfg(any(target_arch = "x86_64", test))]
    pub(super) fn of_two(num_rows: usize, num_panels: usize, num_threads: usize) -> Self {
        let num_blocks = num_rows.div_ceil(BLOCK_ROWS);
        if num_rows < MANY_ROWS {
            let panels_per_task = num_panels.div_ceil(num_threads * 8).max(1).next_multiple_of(4);
            return TaskGrid { num_panels, panels_per_task, num_blocks, blocks_per_task: num_blocks };
        }
        TaskGrid::many_rows(num_panels, num_blocks, num_threads, MAX_PANELS / 2)
    }

    fn many_rows(num_panels: usize, num_blocks: usize, num_threads: usize, max_panels: usize) -> Self {
        let mut parts = 1;
        let panels = |parts: usize| (num_panels * parts).div_ceil(num_threads * TASKS_PER_THREAD).clamp(1, max_panels);
        while panels(parts) < MIN_PANELS && num_blocks / (2 * parts) >= MIN_BLOCKS {
            parts *= 2;
        }
        TaskGrid { num_panels, panels_per_task: panels(parts), num_blocks, blocks_per_task: num_blocks.div_ceil(parts) }
    }

    pub(super) fn num_tasks(&self) -> usize {
        self.num_panels.div_ceil(self.panels_per_task) * self.num_blocks.div_ceil(self.blocks_per_task)
    }

    /// Whether a panel is read by several tasks.
    pub(super) fn splits_rows(&self) -> bool {
        self.blocks_per_task < self.num_blocks
    }

    /// Returns the panels and blocks of a task. Adjacent tasks have the same rows.
    pub(super) fn task(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let across = self.num_panels.div_ceil(self.panels_per_task);
        let part = |i: usize, each: usize, all: usize| i * each..all.min((i + 1) * each);
        (
            part(task % across, self.panels_per_task, self.num_panels),
            part(task / across, self.blocks_per_task, self.num_blocks),
        )
    }
}

/// Returns the panels of a task when there are few rows: few, so that the others do not wait long for a thread that was
/// interrupted. More than two threads get up to four panels, which kernels read at the same time.
fn panels_for_few_rows(num_panels: usize, num_threads: usize) -> usize {
    let each = num_panels.div_ceil(num_threads * 8).max(1);
    if num_threads > 2 { each.max((num_panels / (num_threads * 4)).clamp(1, 4)) } else { each }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "too many cases for an interpreter")]
    fn tasks_cover_all_panels_and_blocks_once() {
        for num_rows in [1, 5, 31, 32, 200, 512, 2_000] {
            for num_panels in [0, 1, 3, 36, 128, 513] {
                for num_threads in [1, 2, 3, 16, 64] {
                    for grid in [TaskGrid::new, TaskGrid::of_two].map(|cut| cut(num_rows, num_panels, num_threads)) {
                        let num_blocks = num_rows.div_ceil(BLOCK_ROWS);
                        let mut times = vec![0; num_panels * num_blocks];
                        for (panels, blocks) in (0..grid.num_tasks()).map(|task| grid.task(task)) {
                            assert!(!panels.is_empty() && !blocks.is_empty());
                            blocks.for_each(|block| panels.clone().for_each(|p| times[block * num_panels + p] += 1));
                        }
                        assert!(times.iter().all(|&times| times == 1), "{grid:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn many_threads_divide_rows_and_few_threads_only_columns() {
        let size = |grid: TaskGrid| (grid.panels_per_task, grid.blocks_per_task);
        assert_eq!(size(TaskGrid::new(512, 128, 2)), (16, 32));
        assert_eq!(size(TaskGrid::new(512, 128, 16)), (8, 8));
        assert_eq!(size(TaskGrid::of_two(512, 512, 16)), (8, 32));
        assert_eq!(size(TaskGrid::new(16, 128, 16)), (2, 1));
    }
}
